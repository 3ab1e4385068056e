"""Law: compression belongs to a model. A handle is attached after DDP and optimizer, and changes nothing else."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import optimus_cc_ext
from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.errors import FlagError, OptimusError
from tests.forked_ranks import run_ranks
from tests.megatron import own_loops
from tests.megatron.recording import hash_of

INT8 = OptimusConfig(
    compressed_backprop_format="int8", dp_compression_format="int8", fused_embedding_sync_format="int8",
)  # fmt: skip
LOW_RANK = OptimusConfig(
    dp_compression_format="low-rank", dp_compression_rank=2, _force_compression=True
)  # fmt: skip
EXACT = {
    2: INT8.replace(_exact_blocks=True, block_rotation=False),
    1: OptimusConfig(dp_compression_format="int8", _exact_blocks=True, block_rotation=False),
}
"""Flags of block formats without rounding, by number of stages: the received values equal the sent ones."""

CLASSES = ("pipeline backward", "DP gradients", "embedding")


def step(model: Any, optimizer: Any, **changes: Any) -> None:
    own_loops.pass_of(model, **changes)
    optimizer.step()


def session_of(handle: Any) -> Any:
    return handle._compressing


def residuals(handle: Any) -> list[torch.Tensor]:
    """Return copies of the residuals that the applied steps of a handle left."""
    return [state.residual.committed.clone() for state in session_of(handle).gradients.states]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest relative error of a gradient."""
    return max(float((found[name] - of).norm() / of.norm()) for name, of in expected.items())


# -- a handle and its model ------------------------------------------------------------------------------------------


def compressed_beside_a_vanilla_model(config: Any) -> tuple[dict[str, float], float, bool, int]:
    own_loops.start(2)
    os.environ["OPTIMUS_CC_NODE"] = (
        f"node {torch.distributed.get_rank()}"  # the preset `balanced` compresses between nodes only
    )
    vanilla, model = own_loops.build(2), own_loops.build(2)
    optimizer = own_loops.optimizer_of(model)
    own_loops.pass_of(vanilla)
    expected, digest = own_loops.gradients(vanilla), own_loops.digest(vanilla)
    handle = optimus_cc_ext.compress(model, optimizer, config, train_iters=10, measure_every=1, compression_trial=False)
    step(model, optimizer)
    far = error(own_loops.gradients(model), expected)
    own_loops.pass_of(vanilla)
    for _ in range(2):
        step(model, optimizer)
    return handle.metrics(), far, own_loops.digest(vanilla) == digest, session_of(handle).completed_steps


@pytest.mark.parametrize("config", ["balanced", INT8], ids=["balanced", "int8"])
def test_a_handle_compresses_its_model_and_no_other_one(config: Any) -> None:
    ranks = run_ranks(4, compressed_beside_a_vanilla_model, config, timeout=120)
    for metrics, far, others_are_vanilla, steps in ranks:
        assert others_are_vanilla and steps == 3
        assert 0 < far < 0.3  # gradients differ at least by a step's rounding to four bits
        for traffic in CLASSES:
            raw, sent = (metrics[f"optimus-cc/{traffic} {kind} bytes"] for kind in ("raw", "sent"))
            assert 0 < sent < raw, traffic
        assert metrics == ranks[0][0]


def two_models_of_one_shape() -> tuple[bool, bool]:
    own_loops.start(1)
    policy, critic, alone = (own_loops.build(1) for _ in range(3))
    handles = [optimus_cc_ext.compress(model, None, LOW_RANK) for model in (policy, critic, alone)]
    for batch in range(2):
        for model, handle, other in ((policy, handles[0], 1), (critic, handles[1], 0)):
            before = residuals(handles[other])
            with handle.step() as this:
                own_loops.pass_of(model, batch=batch if model is policy else 9)
                this.done()
            assert equal(before, residuals(handles[other])), "the other model's residuals"
        with handles[2].step() as this:
            own_loops.pass_of(alone, batch=batch)
            this.done()
    return equal(residuals(handles[0]), residuals(handles[2])), equal(residuals(handles[0]), residuals(handles[1]))


def test_two_models_of_one_shape_share_no_state() -> None:
    assert run_ranks(2, two_models_of_one_shape, timeout=60) == [(True, False)] * 2


# -- steps -----------------------------------------------------------------------------------------------------------


def steps_of(optimizer_kind: str) -> dict[str, Any]:
    own_loops.start(1)
    model = own_loops.build(1)
    optimizer: Any = own_loops.optimizer_of(model)
    if optimizer_kind == "torch":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = optimus_cc_ext.compress(model, optimizer, LOW_RANK)
    session, found = session_of(handle), {}

    def count(name: str, do: Callable[[], Any]) -> None:
        before, steps = residuals(handle), session.completed_steps
        do()
        found[name] = session.completed_steps - steps, not equal(before, residuals(handle))

    def twice(**second: Any) -> None:
        own_loops.pass_of(model)
        step(model, optimizer, **second)

    def announced(applied: bool | None) -> None:
        with handle.step() as this:
            step(model, optimizer, batch=7)
            if applied is not None:
                this.done(applied=applied, grad_norm=1.0, clip_grad=1.0)

    def failing() -> None:
        with pytest.raises(MemoryError):
            own_loops.pass_of(model, fail=True)
        optimizer.step()

    count("a step", lambda: step(model, optimizer))
    count("the optimizer without a pass", optimizer.step)
    count("abandoned", lambda: (own_loops.pass_of(model), model.zero_grad_buffer()))
    count("repeated", twice)
    count("accumulated", lambda: twice(zero=False, batch=1))
    count("announced, applied", lambda: announced(True))
    count("announced, skipped", lambda: announced(False))
    count("announced, not done", lambda: announced(None))
    count("failed", failing)
    count("after it", lambda: step(model, optimizer))
    with pytest.raises(OptimusError, match="no forward-backward pass of this model has run"), handle.step() as this:
        this.done()
    return found


@pytest.mark.parametrize("optimizer", ["megatron", "torch"])
def test_a_step_begins_with_zeroed_gradients_and_ends_with_the_optimizers(optimizer: str) -> None:
    for found in run_ranks(2, steps_of, optimizer, timeout=90):
        nothing = (0, False)
        assert found == {
            "a step": (1, True), "the optimizer without a pass": nothing, "abandoned": nothing, "repeated": (1, True),
            "accumulated": (1, True), "announced, applied": (1, True), "announced, skipped": nothing,
            "announced, not done": nothing, "failed": nothing, "after it": (1, True),
        }  # fmt: skip


def repeated_and_accumulated() -> list[bool]:
    """Return whether the state after a repeated step, and after accumulated passes, is that after one pass."""
    own_loops.start(1)
    models = [own_loops.build(1) for _ in range(3)]
    handles = [optimus_cc_ext.compress(model, None, LOW_RANK) for model in models]
    for passes, model, handle in zip(([(0, True)], [(5, True), (0, True)], [(5, True), (0, False)]), models, handles,
                                     strict=True):  # fmt: skip
        with handle.step() as this:
            for batch, zero in passes:
                own_loops.pass_of(model, batch=batch, zero=zero)
            this.done()
    once, repeated, accumulated = map(residuals, handles)
    return [equal(once, repeated), equal(once, accumulated)]


def test_a_repeated_step_counts_once_and_accumulated_passes_are_kept() -> None:
    assert run_ranks(2, repeated_and_accumulated, timeout=60) == [[True, False]] * 2


def an_outlier() -> list[float]:
    """Return norms of residuals: of a usual step, and of one that clipping shrank far more than usual."""
    own_loops.start(1)
    found = []
    for clip_grad in (1e6, 1e-3):
        model = own_loops.build(1)
        optimizer = own_loops.optimizer_of(model, clip_grad=clip_grad)
        handle = optimus_cc_ext.compress(model, optimizer, LOW_RANK)
        own_loops.pass_of(model)
        usual = session_of(handle)._usual_clipping["main"]
        usual.shrinkage(1.0)
        optimizer.step()
        found.append(float(sum(r.norm() for r in residuals(handle))))
    return found


def test_residuals_are_shrunk_by_what_megatrons_optimizer_clipped() -> None:
    for usual, clipped in run_ranks(2, an_outlier, timeout=60):
        assert 0 < clipped < 0.01 * usual


def what_one_rank_alone_knows() -> tuple[bool, list[float]]:
    """Return if a step that one rank did not apply left a trace, and the norms of the residuals after a usual and a
    strongly clipped step, whose gradient norm the first rank does not know.
    """
    own_loops.start(1)
    rank = torch.distributed.get_rank()
    model = own_loops.build(1)
    handle = optimus_cc_ext.compress(model, None, LOW_RANK)
    before = residuals(handle)
    with handle.step() as this:
        own_loops.pass_of(model)
        this.done(applied=rank == 0, grad_norm=1.0)
    trace, norms = not equal(before, residuals(handle)), []
    for clip_grad in (1e6, 1e-3):
        with handle.step() as this:
            own_loops.pass_of(model)
            session_of(handle)._usual_clipping["main"].shrinkage(1.0)
            this.done(grad_norm=None if rank == 0 else 1.0, clip_grad=clip_grad)
        norms.append(float(sum(r.norm() for r in residuals(handle))))
    return trace, norms


def test_a_step_is_applied_on_all_ranks_or_none_and_clipped_by_the_norm_that_any_of_them_knows() -> None:
    for trace, (usual, clipped) in run_ranks(2, what_one_rank_alone_knows, timeout=60):
        assert not trace
        assert 0 < clipped < 0.01 * usual


# -- finalising ------------------------------------------------------------------------------------------------------


def finalised(stages: int, way: str, ddp: dict[str, Any]) -> tuple[float, bool]:
    """Return how far gradients are from vanilla's, and whether all classes sent something else."""
    from megatron.core.distributed import finalize_model_grads

    own_loops.start(stages)
    found = []
    for compressed in (False, True):
        model = own_loops.build(stages, finalize=way == "inside", **ddp)
        optimizer = own_loops.optimizer_of(model)
        if compressed:
            handle = optimus_cc_ext.compress(model, optimizer, EXACT[stages])
        for _ in range(2):  # Megatron overlaps buckets from the second pass on
            if way == "no schedule":
                own_loops.pass_without_schedule(model)
            else:
                if way == "accumulated":
                    with own_loops.unsynchronised(model):
                        own_loops.pass_of(model, batch=1)
                own_loops.pass_of(model, zero=way != "accumulated")
                if way != "inside":
                    finalize_model_grads([model])
            gradients = own_loops.gradients(model)
            optimizer.step()
        found.append(gradients)
    metrics = handle.metrics()
    classes = CLASSES if stages > 1 else CLASSES[1:2]
    differ = all(metrics[f"optimus-cc/{c} raw bytes"] != metrics[f"optimus-cc/{c} sent bytes"] for c in classes)
    return error(found[1], found[0]), differ


@pytest.mark.parametrize("overlapped", [pytest.param(False, marks=pytest.mark.full), True], ids=["", "overlapped"])
@pytest.mark.parametrize(
    ("stages", "way"),
    [
        (2, "inside"),
        pytest.param(2, "after", marks=pytest.mark.full),
        (2, "accumulated"),
        pytest.param(1, "after", marks=pytest.mark.full),
        (1, "no schedule"),
    ],
)
def test_gradients_are_vanillas_in_whatever_way_they_are_finalised(stages: int, way: str, overlapped: bool) -> None:
    ddp = {"overlap_grad_reduce": overlapped}
    for far, differ in run_ranks(2 * stages, finalised, stages, way, ddp, timeout=90):
        assert far < 1e-5  # the sums are added in another order, in fp32
        assert differ


# -- the end ---------------------------------------------------------------------------------------------------------


def removed(ddp: dict[str, Any]) -> dict[str, bool]:
    own_loops.start(2)
    vanilla, model = own_loops.build(2, **ddp), own_loops.build(2, **ddp)
    optimizer = own_loops.optimizer_of(model)
    handle = optimus_cc_ext.compress(model, optimizer, INT8)
    said: list[str] = []
    finalize = model.config.finalize_model_grads_func

    def remove_inside(*args: Any, **kwargs: Any) -> None:
        finalize(*args, **kwargs)
        with pytest.raises(OptimusError) as refused:
            handle.remove()
        said.append(str(refused.value))

    model.config.finalize_model_grads_func = remove_inside
    own_loops.pass_of(model)
    model.config.finalize_model_grads_func = finalize
    for name in ("zero_grad_buffer", "start_grad_sync"):  # other code wraps the functions that we have wrapped
        setattr(model, name, (lambda original: lambda *a, **k: original(*a, **k))(getattr(model, name)))
    own_loops.pass_of(model)
    handle.remove()
    handle.remove()
    for _ in range(2):
        own_loops.pass_of(vanilla)
        own_loops.pass_of(model)
    is_vanilla = own_loops.digest(model) == own_loops.digest(vanilla)
    for use in (handle.metrics, handle.state_dict, partial(handle.load_state_dict, {}), handle.step().__enter__):
        with pytest.raises(OptimusError, match="was removed"):
            use()
    with optimus_cc_ext.compress(model, optimizer, INT8) as again:
        step(model, optimizer)
        compresses = session_of(again).completed_steps == 1
    return {
        "refused inside a pass": "a forward-backward pass of this model is open" in said[0],
        "vanilla": is_vanilla,
        "compressed again": compresses, "wraps are gone": _nothing_is_wrapped(),
    }  # fmt: skip


def removed_before_gradients_are_final(overlapped: bool, experts: int | None) -> float:
    from megatron.core.distributed import finalize_model_grads

    own_loops.start(2, expert_parallel=experts or 1)
    found = []
    for compressed in (False, True):
        model = own_loops.build(2, finalize=False, overlap_grad_reduce=overlapped, experts=experts)
        for number in range(2):  # Megatron overlaps buckets from the second pass on
            if compressed:
                handle = optimus_cc_ext.compress(model, None, EXACT[2])
                with handle.step():
                    own_loops.pass_of(model)
                    if number:
                        handle.remove()
                    finalize_model_grads([model])
                handle.remove()
            else:
                own_loops.pass_of(model)
                finalize_model_grads([model])
        found.append(own_loops.gradients(model))
    return error(found[1], found[0])


@pytest.mark.parametrize(
    ("overlapped", "experts"),
    [pytest.param(False, None, marks=pytest.mark.full), (True, None), (True, 2)],
    ids=["", "overlapped", "experts"],
)
def test_reductions_that_are_under_way_are_finished_where_a_handle_is_removed(
    overlapped: bool, experts: int | None
) -> None:
    for far in run_ranks(4, removed_before_gradients_are_final, overlapped, experts, timeout=90):
        assert far < 1e-5  # the sums are added in another order, in fp32


def removed_before_parameters_are_gathered() -> tuple[str, list[bool]]:
    """Return the hash of the parameters in the end, and whether a message waited to be sent before the removal."""
    own_loops.start(1)
    ddp = {"use_distributed_optimizer": True, "overlap_param_gather": True, "overlap_grad_reduce": True}
    model = own_loops.build(1, in_bf16=True, **ddp)
    optimizer = own_loops.optimizer_of(model)
    handle = optimus_cc_ext.compress(model, optimizer, OptimusConfig(param_gather_format="int8"))
    owed = []
    for _ in range(3):
        own_loops.pass_of(model)
        optimizer.step()
        owed.append(any(shards.updated for shards in session_of(handle).parameters.buckets))
    handle.remove()
    own_loops.pass_of(model)
    return "".join(hash_of(parameter.data) for parameter in model.parameters()), owed


def test_parameters_that_a_step_changed_are_gathered_where_a_handle_is_removed() -> None:
    (first, owed), (second, _) = run_ranks(2, removed_before_parameters_are_gathered, timeout=60)
    assert any(owed) and first == second, "replicas are equal to the bit"


def _nothing_is_wrapped() -> bool:
    from megatron.core.pipeline_parallel import p2p_communication, schedules

    functions = (p2p_communication._p2p_ops, schedules.forward_backward_no_pipelining)
    return not any(hasattr(function, "__wrapped__") for function in functions)


@pytest.mark.parametrize(
    "ddp", [pytest.param({}, marks=pytest.mark.full), {"overlap_grad_reduce": True}], ids=["", "overlapped"]
)
def test_a_removed_handle_leaves_a_vanilla_model(ddp: dict[str, Any]) -> None:
    for found in run_ranks(4, removed, ddp, timeout=120):
        assert all(found.values()), found


# -- refusals --------------------------------------------------------------------------------------------------------


def refusals() -> list[str]:
    own_loops.start(1)
    model, said = own_loops.build(1), []

    def refused(*args: Any, **kwargs: Any) -> None:
        try:
            optimus_cc_ext.compress(*args, **kwargs)
            said.append("no error")
        except (OptimusError, FlagError) as error:
            said.append(str(error))

    refused(model.module, None, INT8)
    refused(model, None, "papr")
    refused(model, None, OptimusConfig(fused_embedding_sync=True))
    refused(model, None, LOW_RANK.replace(dp_compression_warmup=0.1))
    assert _nothing_is_wrapped()
    refused(model, None, LOW_RANK)
    refused([model], None, LOW_RANK)
    return said


def test_a_handle_that_cannot_work_is_refused_with_reason_and_cure() -> None:
    for said in run_ranks(2, refusals, timeout=60):
        expected = (
            "this GPTModel is not wrapped in megatron-core's DistributedDataParallel", "'papr' is not the name",
            "fused", "their number is not known", "no error", "compressed by another handle already",
        )  # fmt: skip
        assert len(said) == len(expected)
        for found, words in zip(said, expected, strict=True):
            assert words in found
