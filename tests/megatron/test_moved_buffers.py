"""Law: a training loop may free Megatron's buffers between two steps, or move them; it trains to the bit like one that
leaves them where they are, and what it frees is free.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import optimus_cc_ext
from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.errors import OptimusError
from tests.forked_ranks import run_ranks
from tests.megatron import own_loops
from tests.megatron.recording import hash_of

pytestmark = pytest.mark.ci

STEPS = 3
SHARDED = {"in_bf16": True, "use_distributed_optimizer": True}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def config_of(**changes: Any) -> OptimusConfig:
    return OptimusConfig(**changes)


INT8 = config_of(dp_compression_format="int8")
LOW_RANK = config_of(dp_compression_format="low-rank", dp_compression_rank=2, _force_compression=True)
GATHER = config_of(param_gather_format="int8")


# -- ways in which public loops move buffers -------------------------------------------------------------------------


def slices(buffer: Any, of: str) -> dict[Any, torch.Tensor]:
    """Return the views that Megatron has into its buffer of gradients or of parameters, by their owner."""
    from megatron.core.distributed.param_and_grad_buffer import BufferType

    kind = BufferType.GRAD if of == "grad_data" else BufferType.PARAM
    places = {bucket: buffer.bucket_indices[bucket.bucket_id] for bucket in buffer.buckets}
    views = {owner: buffer._get(torch.Size([end - start]), start, kind) for owner, (start, end) in places.items()}
    return views | {p: buffer._get(p.shape, buffer.param_index_map[p][0], kind) for p in buffer.params}


def forget(model: Any) -> None:
    """Drop the shards that Megatron keeps, as loops that move buffers do (NVIDIA/Megatron-LM#3112)."""
    for group in model.bucket_groups:
        group.cached_grad_buffer_shard_list = [None] * len(group.buckets)
        group.cached_param_buffer_shard_list = [None] * len(group.buckets)


def free_for_new(model: Any) -> None:
    for buffer in model.buffers:
        for bucket in buffer.buckets:
            bucket.grad_data = None
        for parameter in buffer.params:
            parameter.main_grad = None
        buffer.grad_data = None
    forget(model)


def allocate_new(model: Any) -> None:
    for buffer in model.buffers:
        buffer.grad_data = torch.zeros(buffer.numel, dtype=buffer.grad_dtype)
        for owner, view in slices(buffer, "grad_data").items():
            setattr(owner, "main_grad" if isinstance(owner, torch.nn.Parameter) else "grad_data", view)


def free_data(model: Any) -> None:
    for buffer in model.buffers:
        for holder in (buffer, *buffer.buckets):
            holder.grad_data.data = torch.zeros(1, dtype=buffer.grad_dtype)
        for parameter in buffer.params:
            parameter.main_grad = None
    forget(model)


def allocate_data(model: Any) -> None:
    for buffer in model.buffers:
        buffer.grad_data.data = torch.zeros(buffer.numel, dtype=buffer.grad_dtype)
        for owner, view in slices(buffer, "grad_data").items():
            if isinstance(owner, torch.nn.Parameter):
                owner.main_grad = view
            else:
                owner.grad_data.data = view


WAYS: dict[str, tuple[Callable[[Any], None], Callable[[Any], None]]] = {
    "new tensors": (free_for_new, allocate_new),
    "data": (free_data, allocate_data),
    "resize": (
        lambda model: model.offload_grad_buffers(synchronize=False, empty_cache=False),
        lambda model: model.restore_grad_buffers(synchronize=False),
    ),
}
"""Ways to free the gradients, and to allocate them anew: ChatLearn's, ROLL's, and Megatron's own."""


def move_parameters(model: Any, optimizer: Any) -> None:
    """Move the parameters into new memory: the buffers, their buckets, the weights and the optimizer's views, as ROLL
    does.
    """
    for buffer in model.buffers:
        buffer.param_data.data = buffer.param_data.detach().clone()
        for owner, view in slices(buffer, "param_data").items():
            (owner if isinstance(owner, torch.nn.Parameter) else owner.param_data).data = view
    forget(model)
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        for number, group in enumerate(each.opt_group_ranges):
            for place, parameter in enumerate(group["params"]):
                of_buffer, dtype, bucket = each.model_param_gbuf_map[parameter]
                mine = each.gbuf_ranges[of_buffer][dtype][bucket]["param_map"][parameter]["param"]
                each.shard_float16_groups[number][place] = parameter.detach().view(-1)[mine.start : mine.end]


def holders(storage: torch.UntypedStorage) -> int:
    """Count the references to this storage, in Python and in C++, without the caller's own."""
    gc.collect()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


# -- gradients -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A layout with its compression."""

    config: OptimusConfig
    stages: int = 1
    ddp: dict[str, Any] = field(default_factory=dict)


def trained(case: Case, way: str | None) -> tuple[str, int]:
    """Train, and free the gradients after each step; return a hash of the weights, and who still held gradients."""
    model = own_loops.build(case.stages, **case.ddp)
    optimizer = own_loops.optimizer_of(model)
    held = 0
    with optimus_cc_ext.compress(model, optimizer, case.config):
        for number in range(STEPS):
            own_loops.pass_of(model, batch=number)
            optimizer.step()
            optimizer.zero_grad()
            if way is not None:
                free, allocate = WAYS[way]
                storages = [buffer.grad_data.untyped_storage() for buffer in model.buffers]
                free(model)
                # With `resize` Megatron keeps the tensors, which are empty.
                held += 0 if way == "resize" else sum(map(holders, storages))
                own_loops.pass_of(model, forward_only=True)
                allocate(model)
    return "".join(hash_of(parameter.data) for parameter in model.parameters()), held


def in_all_ways(stages: int, cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """Return, by case and way, whether the weights are those of a loop that frees nothing, and who held gradients."""
    own_loops.start(stages)
    found: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        expected, _ = trained(case, None)
        ways = {way: trained(case, way) for way in WAYS}
        found[name] = {way: (weights == expected, held) for way, (weights, held) in ways.items()}
    return found


def check_gradients(ranks: int, stages: int, cases: dict[str, Case], node: str = "ranks:1") -> None:
    env = {"OPTIMUS_CC_NODE": node}
    for found in run_ranks(ranks, in_all_ways, stages, cases, timeout=240, env=env):
        assert found == {name: dict.fromkeys(WAYS, (True, 0)) for name in cases}


def test_gradients_that_a_loop_frees_and_allocates_anew_are_reduced_to_the_bit() -> None:
    check_gradients(2, 1, {"int8": Case(INT8), "low rank": Case(LOW_RANK)})


@pytest.mark.full
def test_moved_gradients_are_reduced_with_shards_and_beside_the_backward_pass() -> None:
    both = GATHER.replace(dp_compression_format="int4")
    check_gradients(2, 1, {
        "sharded": Case(both, ddp=SHARDED), "overlapped": Case(both, ddp=SHARDED | OVERLAPPED),
        "low rank, sharded": Case(LOW_RANK, ddp=SHARDED),
        "low rank, overlapped": Case(LOW_RANK, ddp={"overlap_grad_reduce": True}),
    })  # fmt: skip


@pytest.mark.full
def test_moved_gradients_are_reduced_in_two_levels() -> None:
    cases = {"int8": Case(INT8), "sharded": Case(INT8, ddp=SHARDED)}
    check_gradients(4, 1, cases, node="ranks:2")


@pytest.mark.full
def test_moved_gradients_of_a_tied_embedding_are_reduced() -> None:
    in_blocks, dense = config_of(fused_embedding_sync_format="int8"), config_of(fused_embedding_sync=True)
    check_gradients(4, 2, {
        "with int8": Case(in_blocks.replace(dp_compression_format="int8"), 2), "gradients dense": Case(in_blocks, 2),
        "all dense": Case(dense, 2), "sharded": Case(in_blocks, 2, SHARDED),
    })  # fmt: skip


# -- parameters ------------------------------------------------------------------------------------------------------


def with_parameters(moved: bool, overlapped: bool) -> tuple[str, int]:
    """Train, and move the parameters after each step; return a hash of them, and who still held old ones."""
    model = own_loops.build(1, **SHARDED | (OVERLAPPED if overlapped else {}))
    optimizer = own_loops.optimizer_of(model)
    held = 0
    with optimus_cc_ext.compress(model, optimizer, GATHER):
        for number in range(STEPS):
            own_loops.pass_of(model, batch=number)
            optimizer.step()
            if overlapped:
                model.disable_forward_pre_hook(param_sync=True)
            if moved:
                storages = [buffer.param_data.untyped_storage() for buffer in model.buffers]
                move_parameters(model, optimizer)
                held += sum(map(holders, storages))
            own_loops.pass_of(model, forward_only=True)
            if overlapped:
                model.enable_forward_pre_hook()
        if overlapped:
            model.disable_forward_pre_hook(param_sync=True)
    return "".join(hash_of(parameter.data) for parameter in model.parameters()), held


def moved_parameters(overlaps: list[bool]) -> list[tuple[str, str, int]]:
    own_loops.start(1)
    found = []
    for overlapped in overlaps:
        (expected, _), (weights, held) = (with_parameters(moved, overlapped) for moved in (False, True))
        found.append((expected, weights, held))
    return found


@pytest.mark.parametrize("overlapped", [False, pytest.param(True, marks=pytest.mark.full)], ids=["", "overlapped"])
def test_parameters_that_a_loop_moves_are_gathered_to_the_bit(overlapped: bool) -> None:
    for [(expected, weights, held)] in run_ranks(2, moved_parameters, [overlapped], timeout=90):
        assert weights == expected
        assert held == 0


# -- buffers that no longer fit --------------------------------------------------------------------------------------


def refusals() -> list[str]:
    own_loops.start(1)
    model = own_loops.build(1, finalize=False, **SHARDED)
    optimizer, said = own_loops.optimizer_of(model), []
    [bucket, *_] = model.buffers[0].buckets

    def refused(attribute: str, changed: Any, use: Callable[[], Any]) -> None:
        before = getattr(bucket, attribute)
        setattr(bucket, attribute, changed)
        try:
            use()
            said.append("no error")
        except OptimusError as error:
            said.append(str(error))
        setattr(bucket, attribute, before)

    with optimus_cc_ext.compress(model, None, GATHER.replace(dp_compression_format="int8")) as handle:
        with handle.step():
            own_loops.pass_of(model)
            for changed in (bucket.grad_data[2:], bucket.grad_data.double(), bucket.grad_data.to("meta"), None):
                refused("grad_data", changed, model.finish_grad_sync)
            model.finish_grad_sync()
            optimizer.prepare_grads()
        refused("param_data", bucket.param_data[2:], optimizer.step_with_ready_grads)
    return said


def test_a_buffer_that_no_longer_fits_is_refused_with_reason_and_cure() -> None:
    for rank, said in enumerate(run_ranks(2, refusals, timeout=60)):
        for found, words in zip(said, ("gradients", "gradients", "gradients", "gradients", "parameters"), strict=True):
            assert f"rank {rank}: the {words} of a bucket are " in found and "remove()" in found
        assert "torch.float64 on cpu" in said[1] and "on meta" in said[2] and "are none, and were " in said[3]
