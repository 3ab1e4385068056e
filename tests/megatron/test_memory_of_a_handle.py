"""Law: the number for memory is the memory: a handle reaches as many bytes as its log announces, to the byte."""

import gc
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import optimus_cc_ext
from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.compressors import fast
from optimus_cc_ext.compressors.blocks import Codec
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.compressors.triton import launches
from optimus_cc_ext.compressors.triton.blocks import Tables
from tests.forked_ranks import run_ranks
from tests.interpreted import assert_holds_in_tritons_interpreter
from tests.megatron import own_loops

HIDDEN, STEPS = 512, 3
"""A model so wide that messages are most of what compression takes."""

SHARDED = {"in_bf16": True, "use_distributed_optimizer": True}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1_500_000}
BLOCKS = OptimusConfig(dp_compression_format="int8", param_gather_format="int4")
IN_SLICES = BLOCKS.replace(message_memory=4)
CASES: dict[str, tuple[OptimusConfig, dict[str, Any]]] = {
    "one message": (BLOCKS, SHARDED),
    "slices": (IN_SLICES, SHARDED | OVERLAPPED),
    "whole gradients": (OptimusConfig(dp_compression_format="int4", message_memory=4), {}),
    "exact": (OptimusConfig(param_gather_format="exact", message_memory=8), SHARDED),
    "low rank": (OptimusConfig(dp_compression_format="low-rank", dp_compression_rank=8), {}),
}
IN_FP32 = SHARDED | {"reduce_scatter_with_fp32_accumulation": True}

_MESSAGES = ("before", "received", "summed in fp32")
"""Names of the scratch memory that is announced with the messages."""

FEW = 64
"""Most bytes of flags and lengths, which are not announced."""


class Memory(NamedTuple):
    announced: int
    """Bytes of messages and of compression state that the log announces."""

    unnamed: int
    """Bytes that the handle reaches beside these, without `others`."""

    others: int
    """Bytes of the codecs' intermediate results and rotations."""

    tables: int
    """Bytes of the kernels' tables among the announced ones."""


def trained(config: OptimusConfig, ddp: dict[str, Any], hidden: int = HIDDEN, steps: int = STEPS) -> Memory:
    """Train a GPT for some steps, and count the bytes of all storages that the handle reaches."""
    own_loops.start(1)
    model = own_loops.build(1, hidden=hidden, **ddp)
    optimizer = own_loops.optimizer_of(model)
    session = optimus_cc_ext.compress(model, optimizer, config)._session
    for number in range(steps):
        own_loops.pass_of(model, batch=number)
        optimizer.step()
        optimizer.zero_grad()
    objects, others = list(_reached(session)), dict[int, int]()
    for each in objects:
        if isinstance(each, Scratch):
            others |= _storages(buffer for (name, *_), buffer in each._buffers.items() if name not in _MESSAGES)
        elif isinstance(each, Codec):
            rotations = {**each._rotations, **getattr(each, "_matrices", {})}
            others |= _storages([*rotations.values(), *([] if each._signs is None else [each._signs])])
    everything = _storages(each for each in objects if isinstance(each, torch.Tensor))
    announced = session.message_bytes + sum(technique.states.nbytes for technique in session.techniques)
    tables = _storages(part for each in objects if isinstance(each, Tables) for part in (each.blocks, each.dense))
    besides = sum(others.values())
    return Memory(announced, sum(everything.values()) - besides - announced, besides, sum(tables.values()))


def trained_with_kernels(config: OptimusConfig, ddp: dict[str, Any]) -> Memory:
    """Train a small GPT for one step with Triton's kernels in its interpreter."""
    fast._triton_applies = lambda: True
    return trained(config, ddp, hidden=128, steps=1)


def _reached(start: Any) -> Iterator[Any]:
    """Return all objects that an object refers to, but classes, modules, and what is Megatron's or torch's."""
    seen, left = set[int](), [start]
    while left:
        found = left.pop()
        foreign = type(found).__module__.startswith(("megatron", "torch.nn", "torch.distributed"))
        if id(found) in seen or foreign or isinstance(found, type | ModuleType):
            continue
        seen.add(id(found))
        yield found
        # A function refers to all globals of its module.
        left += (found.__closure__ or ()) if isinstance(found, FunctionType) else gc.get_referents(found)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of the tensors' storages, by address."""
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def copies_over_one_rank(config: OptimusConfig, ddp: dict[str, Any]) -> int:
    """Count the all-to-alls of a step over one rank, each of which gets a copy of a bucket."""
    original, found = torch.distributed.all_to_all_single, list[int]()

    def noted(*args: Any, **kwargs: Any) -> Any:
        found.append(kwargs["group"].size())
        return original(*args, **kwargs)

    torch.distributed.all_to_all_single = noted
    trained(config, ddp, hidden=64, steps=1)
    assert found
    return found.count(1)


def check(ranks: int, node: str, config: OptimusConfig, ddp: dict[str, Any]) -> None:
    for found in run_ranks(ranks, trained, config, ddp, timeout=240, env={"OPTIMUS_CC_NODE": node}):
        assert 0 <= found.unnamed <= FEW and found.announced > 1e6


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.ci if name == "slices" else pytest.mark.full) for name in CASES]
)
def test_a_handle_reaches_the_bytes_that_are_announced(name: str) -> None:
    check(2, "ranks:1", *CASES[name])


@pytest.mark.full
def test_sums_in_fp32_inside_a_node_take_what_is_announced() -> None:
    check(4, "ranks:2", IN_SLICES, IN_FP32)


@pytest.mark.full
@pytest.mark.skipif(not launches.AVAILABLE, reason="triton is missing, or older than 3.6")
@pytest.mark.skipif(launches.INTERPRETED, reason="they run in this process")
@pytest.mark.timeout(600)
def test_memory_with_kernels_holds_in_tritons_interpreter() -> None:
    assert_holds_in_tritons_interpreter(__file__, "TestKernels", timeout=580)


class TestKernels:
    __test__ = launches.INTERPRETED

    def test_their_tables_are_announced_and_a_gather_shares_those_of_its_reduction(self) -> None:
        env = {"OPTIMUS_CC_NODE": "ranks:1"}
        for found in run_ranks(2, trained_with_kernels, BLOCKS, SHARDED | OVERLAPPED, timeout=500, env=env):
            assert 0 <= found.unnamed <= FEW < found.tables < found.announced / 100


@pytest.mark.ci
@pytest.mark.parametrize("overlap", [False, True])
def test_where_sums_in_fp32_are_replaced_megatron_copies_no_bucket(overlap: bool) -> None:
    ddp = IN_FP32 | {"overlap_grad_reduce": overlap}
    assert run_ranks(2, copies_over_one_rank, BLOCKS, ddp, env={"OPTIMUS_CC_NODE": "ranks:1"}) == [0, 0]
