"""Law: a handle works beside threads, evaluation, and the process's other models, wraps and groups."""

import functools
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import optimus_cc_ext
from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.errors import FlagError
from tests.forked_ranks import run_ranks
from tests.megatron import own_loops

pytestmark = pytest.mark.ci

INT8 = OptimusConfig(
    pipeline_forward_format="int8", compressed_backprop_format="int8", dp_compression_format="int8",
)  # fmt: skip
BETWEEN_STAGES = INT8.replace(dp_compression_format="dense")
LOW_RANK = OptimusConfig(
    compressed_backprop_format="low-rank", compressed_backprop_rank=4, compressed_backprop_messages="all",
    residual_across_iterations="carry", dp_compression_format="low-rank", dp_compression_rank=2,
    _force_compression=True,
)  # fmt: skip


def a_step(model: Any, optimizer: Any, groups: Any = None, batch: int = 0) -> str:
    """Take a step, and return the hash of its gradients."""
    own_loops.pass_of(model, groups, batch=batch)
    digest = own_loops.digest(model)
    optimizer.step()
    return digest


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def over_all_ranks() -> Any:
    groups = own_loops.groups_of_ones_own(1)
    groups.dp = groups.dp_cp = dist.new_group(list(range(dist.get_world_size())))
    return groups


def groups_of_this_rank() -> int:
    return len(dist.distributed_c10d._world.pg_map)


# -- threads and evaluation ------------------------------------------------------------------------------------------


def with_a_thread_that_generates(busy: bool) -> list[str]:
    """Train a policy; if `busy`, another thread has a pass of a reference model open at every message of the policy."""
    own_loops.start(2)
    model = own_loops.build(2)
    groups = own_loops.groups_of_ones_own(1)
    reference = own_loops.build(1, groups, tied=False).module
    handle = optimus_cc_ext.compress(model, None, BETWEEN_STAGES)
    inside, trained, failed = threading.Event(), threading.Event(), []

    def generate() -> None:
        try:
            with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
                patch.setattr(reference, "forward", functools.partial(held, reference.forward, inside, trained))
                own_loops.pass_of(reference, groups, forward_only=True)
        except BaseException as error:  # the test sees every error of the thread
            failed.append(repr(error))
            inside.set()

    thread = threading.Thread(target=generate)
    if busy:
        thread.start()
        assert inside.wait(50)
    found = []
    for batch in range(3):
        with handle.step() as this:
            own_loops.pass_of(model, batch=batch)
            this.done()
        found.append(own_loops.digest(model))
    trained.set()
    if busy:
        thread.join(50)
    metrics = handle.metrics()
    for traffic in ("pipeline forward", "pipeline backward"):
        assert metrics[f"optimus-cc/{traffic} sent bytes"] < metrics[f"optimus-cc/{traffic} raw bytes"], traffic
    return found + failed


def held(original: Any, inside: threading.Event, trained: threading.Event, *args: Any, **kwargs: Any) -> Any:
    inside.set()
    assert trained.wait(50)
    return original(*args, **kwargs)


def test_another_thread_may_run_a_reference_while_a_model_trains() -> None:
    assert run_ranks(2, with_a_thread_that_generates, True, timeout=90) == run_ranks(
        2, with_a_thread_that_generates, False, timeout=90
    )


def evaluated(often: bool) -> tuple[list[str], list[float]]:
    """Train with an own AdamW that clips by hand; if `often`, evaluate inside of steps and between them."""
    own_loops.start(2)
    model = own_loops.build(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = optimus_cc_ext.compress(model, optimizer, LOW_RANK)

    def evaluate() -> None:
        if often:
            with torch.no_grad():
                own_loops.pass_of(model, batch=9, forward_only=True)

    digests = []
    for batch in range(3):
        evaluate()
        with handle.step(batch) as this:
            evaluate()
            own_loops.pass_of(model, batch=batch)
            digests.append(own_loops.digest(model))
            evaluate()
            square = torch.stack([p.main_grad.square().sum() for p in model.parameters()]).sum()
            dist.all_reduce(square)
            norm = float(square.sqrt())
            for parameter in model.parameters():
                parameter.grad = parameter.main_grad * min(1.0, 1.0 / norm)
            optimizer.step()
            this.done(grad_norm=norm, clip_grad=1.0)
    session = handle._session
    norms = [float(r.norm()) for technique in session.techniques for r in technique.states.residuals()]
    assert session.completed_steps == 3 and all(norms)
    return digests, [*norms, *(value for name, value in handle.metrics().items() if name.endswith("bytes"))]


@pytest.mark.full
def test_evaluation_between_steps_and_inside_of_them_touches_nothing() -> None:
    assert run_ranks(4, evaluated, True, timeout=90) == run_ranks(4, evaluated, False, timeout=90)


# -- other models and ranks ------------------------------------------------------------------------------------------


def an_encoder_beside_a_policy_that_compresses_on_one_stage() -> tuple[float, float, dict[str, float]]:
    """Return how far the encoder's and the policy's gradients are from vanilla's, and the policy's bytes."""
    own_loops.start(2)
    groups = over_all_ranks()
    found = []
    for on in (False, True):
        policy, encoder = own_loops.build(2), own_loops.build(1, groups, tied=False)
        optimizers = sgd(policy), sgd(encoder)
        if on:
            of_policy = optimus_cc_ext.compress(policy, optimizers[0], INT8.replace(dp_compression_stages=1))
            optimus_cc_ext.compress(encoder, optimizers[1], OptimusConfig(dp_compression_format="int8"))
        for model, its in ((encoder, groups), (policy, None)):
            own_loops.pass_of(model, its)
        found.append([own_loops.gradients(model) for model in (encoder, policy)])
    far = [
        max(float((now[name] - of).norm() / of.norm()) for name, of in before.items())
        for before, now in zip(*found, strict=True)
    ]
    optimizers[0].step()
    return far[0], far[1], of_policy.metrics()


def test_a_policy_that_compresses_on_one_stage_leaves_an_encoder_over_all_ranks_alone() -> None:
    for encoder, policy, metrics in run_ranks(4, an_encoder_beside_a_policy_that_compresses_on_one_stage, timeout=90):
        assert 0 < encoder < 0.05 and 0 < policy < 0.1  # one message rounds to eight bits, two messages twice
        assert metrics["optimus-cc/DP gradients sent bytes"] < metrics["optimus-cc/DP gradients raw bytes"]


def groups_of_ones_own_alone() -> dict[str, float]:
    """Train a pipeline on groups of its own, without Megatron's `parallel_state`."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    dist.init_process_group("gloo")
    parallel_state._set_global_memory_buffer()  # Megatron's linear layers take their workspace from this global buffer
    get_cuda_rng_tracker().add("model-parallel-rng", 1)
    groups = own_loops.groups_of_ones_own(2)
    model = own_loops.build(2, groups)
    with optimus_cc_ext.compress(model, sgd(model), BETWEEN_STAGES) as handle:
        own_loops.pass_of(model, groups)
        assert not parallel_state.model_parallel_is_initialized()
        return handle.metrics()


def test_a_handle_needs_no_parallel_state() -> None:
    for metrics in run_ranks(2, groups_of_ones_own_alone, timeout=60):
        for traffic in ("pipeline forward", "pipeline backward"):
            raw, sent = (metrics[f"optimus-cc/{traffic} {kind} bytes"] for kind in ("raw", "sent"))
            assert 0 < sent < raw


def one_rank_trains_alone() -> str:
    own_loops.start(1)
    groups = own_loops.groups_of_ones_own(1)
    model = own_loops.build(1, groups, tied=False)
    if dist.get_rank() == 0:
        with pytest.raises(FlagError, match="nothing to compress"):
            optimus_cc_ext.compress(model, sgd(model), OptimusConfig(dp_compression_format="int8"))
        optimizer = sgd(model)
        with optimus_cc_ext.compress(model, optimizer, "balanced"):
            a_step(model, optimizer, groups)
    dist.barrier()
    return "through"


def test_ranks_without_the_model_are_not_waited_for() -> None:
    assert run_ranks(2, one_rank_trains_alone, timeout=60) == ["through"] * 2


# -- process groups and wraps ----------------------------------------------------------------------------------------


def many_handles() -> tuple[list[int], list[str]]:
    """Return the number of process groups after each handle, and the hash of each handle's gradients."""
    own_loops.start(2)
    for _ in range(dist.get_rank()):  # ranks get unequal numbers of groups
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    config = INT8.replace(fused_embedding_sync=True)
    numbers, digests = [], []
    for _ in range(4):
        model = own_loops.build(2)
        optimizer = own_loops.optimizer_of(model)
        with optimus_cc_ext.compress(model, optimizer, config):
            digests.append(a_step(model, optimizer))
        numbers.append(groups_of_this_rank())
    return numbers, digests


def test_handles_come_and_go_without_a_group_left_over_where_ranks_hold_unequal_numbers_of_groups() -> None:
    for rank, (numbers, digests) in enumerate(run_ranks(4, many_handles, timeout=90)):
        assert len(set(numbers)) == len(set(digests)) == 1, rank


def groups_made_anew() -> tuple[bool, str]:
    from megatron.core import parallel_state, tensor_parallel

    own_loops.start(2)
    digests = []
    for _ in range(2):
        model = own_loops.build(2)
        optimizer = own_loops.optimizer_of(model)
        optimus_cc_ext.compress(model, optimizer, BETWEEN_STAGES)
        digests.append(a_step(model, optimizer))
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=1)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    model, said = own_loops.build(1), "no error"
    try:
        optimus_cc_ext.compress(model, None, OptimusConfig(fused_embedding_sync=True))
    except FlagError as error:
        said = str(error)
    return digests[0] == digests[1], said


def test_a_model_of_new_groups_is_compressed_by_them_and_by_no_earlier_ones() -> None:
    for same, said in run_ranks(2, groups_made_anew, timeout=60):
        assert same
        assert "fused_embedding_sync" in said and "there is nothing to fuse" in said


def tapped_by_others() -> dict[str, bool]:
    """Let a profiler wrap Megatron's functions around our wraps, and remove the handle while the profiler's wraps
    stay.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.pipeline_parallel import p2p_communication, schedules

    own_loops.start(2)
    vanilla = own_loops.build(2)
    expected = a_step(vanilla, own_loops.optimizer_of(vanilla))
    model = own_loops.build(2)
    optimizer = own_loops.optimizer_of(model)
    handle = optimus_cc_ext.compress(model, optimizer, BETWEEN_STAGES)
    for owner, name in (
        (schedules, "forward_backward_pipelining_without_interleaving"), (p2p_communication, "_p2p_ops"),
        (p2p_communication, "_batched_p2p_ops"), (DistributedDataParallel, "__init__"),
    ):  # fmt: skip
        tap(owner, name)
    found = {"compressed under the tap": a_step(model, optimizer) != expected}
    handle.remove()
    counted = handle._session.traffic.as_list()
    fresh = own_loops.build(2)
    found["vanilla after remove()"] = a_step(fresh, own_loops.optimizer_of(fresh)) == expected
    found["not counted"] = counted == handle._session.traffic.as_list()
    fresh = own_loops.build(2)
    optimizer = own_loops.optimizer_of(fresh)
    with optimus_cc_ext.compress(fresh, optimizer, BETWEEN_STAGES) as again:
        found["compressed again"] = a_step(fresh, optimizer) != expected
        metrics = again.metrics()
    raw, sent = (metrics[f"optimus-cc/pipeline forward {kind} bytes"] for kind in ("raw", "sent"))
    found["compressed once"] = 3 < raw / sent < 4
    return found


def tap(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    setattr(owner, name, tapped)


def test_wraps_around_ours_neither_keep_compression_alive_nor_prevent_the_next() -> None:
    for found in run_ranks(2, tapped_by_others, timeout=60):
        assert all(found.values()), found
