"""Law: what a handle cannot compress is refused in one sentence, on all ranks of the model, and nothing hangs."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

import optimus_cc_ext
from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.errors import OptimusError
from tests.forked_ranks import run_ranks
from tests.megatron import own_loops

pytestmark = pytest.mark.ci

FE = OptimusConfig(fused_embedding_sync=True)
SC = OptimusConfig(dp_compression_format="int8")


def said(do: Callable[[], Any]) -> str:
    try:
        do()
    except (OptimusError, TypeError) as error:
        return str(error)
    return "no error"


def models_with_groups_that_do_not_fit() -> dict[str, str]:
    own_loops.start(1)
    found = {}
    for name, value, config in (
        ("embd", None, FE), ("pp", "twice", FE), ("dp", "pipeline", SC.replace(dp_compression_stages=1)),
        ("dp", "pipeline", SC),
    ):  # fmt: skip
        groups = own_loops.groups_of_ones_own(2)
        model = own_loops.build(2, groups)
        if value == "twice":
            model.pp_group = [groups.pp, groups.pp]
        elif name == "embd":
            model.module.embd_group = None
        else:
            for bucket_group in model.bucket_groups:
                bucket_group.data_parallel_group = groups.pp
            model.dp_cp_group = groups.pp
        found[f"{name} {config.dp_compression_stages}"] = said(
            lambda m=model, c=config: optimus_cc_ext.compress(m, None, c)
        )
    return found


def test_process_groups_that_do_not_fit_are_named_on_all_ranks() -> None:
    for found in run_ranks(2, models_with_groups_that_do_not_fit, timeout=60):
        assert "the model has no embedding process group" in found["embd all"] and "`embd`" in found["embd all"]
        assert "the model has no pipeline process group" in found["pp all"] and "`pp`" in found["pp all"]
        assert "the replicas of a gradient bucket are on the stages 0, 1" in found["dp 1"]
        assert found["dp all"] == "no error"


def one_rank_alone() -> list[str]:
    """Let rank 1 give settings that cannot work; then attach a second handle on rank 0 only. Return the errors."""
    own_loops.start(1)
    model, rank = own_loops.build(1), torch.distributed.get_rank()
    found = [
        said(lambda: optimus_cc_ext.compress(model, None, FE if rank == 1 else SC)),
        said(lambda: optimus_cc_ext.compress(model, None, {"dp_compression_format": "low-rank"})),  # type: ignore[arg-type]
    ]
    with optimus_cc_ext.compress(own_loops.build(1) if rank else model, None, SC):
        found.append(said(lambda: optimus_cc_ext.compress(model, None, SC)))
    return found


def test_a_refusal_of_one_rank_is_raised_on_all() -> None:
    first, second = run_ranks(2, one_rank_alone, timeout=60)
    assert first[0] == f"rank 1: {second[0]}" and "there is nothing to fuse" in second[0]
    assert first[1] == "config: a preset's name or an OptimusConfig is needed, not a dict" == second[1]
    assert "models: compressed by another handle already" in first[2] and second[2] == f"rank 0: {first[2]}"


def gradients_that_are_freed() -> str:
    """Free the gradients of rank 1 before it compresses its model. Return the error."""
    own_loops.start(1)
    model = own_loops.build(1)
    if torch.distributed.get_rank() == 1:
        model.bucket_groups[0].buckets[0].grad_data = None
    return said(lambda: optimus_cc_ext.compress(model, None, SC))


def test_gradients_that_are_freed_before_compression_are_refused_on_all_ranks() -> None:
    first, second = run_ranks(2, gradients_that_are_freed, timeout=60)
    assert first == f"rank 1: {second}"
    assert second.startswith("models: the gradients of a bucket are freed. Allocate them")


def steps_without_messages() -> dict[str, str]:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import schedules

    own_loops.start(2)
    kept, found = schedules.forward_backward_pipelining_without_interleaving, {}

    def a_step(
        name: str, config: OptimusConfig, after: Callable[[Any], Any], schedule: Any = None, steps: bool = True
    ) -> None:
        model = own_loops.build(2, finalize=False)
        optimizer = own_loops.optimizer_of(model)
        with suppress(OptimusError), optimus_cc_ext.compress(model, optimizer, config):
            own_loops.pass_of(model, schedule=schedule)
            after(model)
            found[name] = said(optimizer.step if steps else model.zero_grad_buffer)

    a_step("a kept schedule", SC, lambda model: finalize_model_grads([model]), kept)
    # A loop that updates the parameters past the optimizer's methods is asked when it zeroes the gradients again.
    a_step("a kept schedule, updated by hand", SC, lambda model: finalize_model_grads([model]), kept, steps=False)
    a_step("not finalised", SC, lambda model: None)
    a_step("embedding left", FE, lambda model: model.finish_grad_sync())
    a_step("finalised", FE, lambda model: finalize_model_grads([model]))
    a_step("without a pass", FE, lambda model: (finalize_model_grads([model]), model.zero_grad_buffer()))
    return found


def test_a_step_in_which_a_class_saw_no_message_is_refused_before_the_optimizer_steps() -> None:
    for found in run_ranks(4, steps_without_messages, timeout=120):
        for name, words in {
            "a kept schedule": "gradients were reduced outside of the forward-backward passes that Optimus-CC sees",
            "a kept schedule, updated by hand": "gradients were reduced outside of the forward-backward passes",
            "not finalised": "no gradient bucket was reduced", "embedding left": "the tied embedding was not summed",
        }.items():  # fmt: skip
            assert found[name].startswith("rank ") and words in found[name], name
        assert found["finalised"] == found["without a pass"] == "no error"


def announced_steps_of_a_kept_schedule(known: bool) -> tuple[str, int]:
    """Return the error of a step that the loop announces, and how often the optimizer stepped before it."""
    from megatron.core.pipeline_parallel import schedules

    own_loops.start(2)
    kept = schedules.forward_backward_pipelining_without_interleaving
    model = own_loops.build(2)
    optimizer, steps = own_loops.optimizer_of(model), 0
    original = optimizer.step

    def counting() -> Any:
        nonlocal steps
        steps += 1
        return original()

    optimizer.step = counting
    handle = optimus_cc_ext.compress(model, optimizer if known else None, SC)

    def a_step() -> None:
        with handle.step() as this:
            own_loops.pass_of(model, schedule=kept)
            optimizer.step()
            this.done()

    return said(a_step), steps


@pytest.mark.parametrize("known", [True, False], ids=["optimizer given", "None"])
def test_announced_steps_are_judged_before_the_optimizers_first_collective(known: bool) -> None:
    for found, steps in run_ranks(4, announced_steps_of_a_kept_schedule, known, timeout=60):
        assert found.startswith("rank 0: gradients were reduced outside of the forward-backward passes")
        assert steps == 0


def gathers_without_an_update(replaced: bool) -> list[str]:
    """Return the errors of three steps, in which other code may write the parameters past the wrap of Optimus-CC."""
    own_loops.start(1)
    model = own_loops.build(1, in_bf16=True, use_distributed_optimizer=True)
    optimizer = own_loops.optimizer_of(model)
    if replaced:
        inner = optimizer.chained_optimizers[0]
        inner._copy_main_params_to_model_params = inner._copy_main_params_to_model_params
    optimus_cc_ext.compress(model, optimizer, OptimusConfig(param_gather_format="int8"))
    found = []
    for _ in range(3):
        own_loops.pass_of(model)
        found.append(said(optimizer.step))
    return found


def test_a_gather_that_carried_no_update_is_refused_in_the_second_step() -> None:
    assert run_ranks(2, gathers_without_an_update, False, timeout=60) == [["no error"] * 3] * 2
    for first, *later in run_ranks(2, gathers_without_an_update, True, timeout=60):
        assert first == "no error", "the first gather carries none"
        assert "rank 0: no parameters were gathered after a step of Megatron's distributed optimizer" in later[0]


def never_ended() -> str:
    own_loops.start(1)
    model = own_loops.build(1)
    optimus_cc_ext.compress(model, None, SC)
    own_loops.pass_of(model)
    return said(lambda: own_loops.pass_of(model))


def test_steps_that_nothing_can_end_are_refused() -> None:
    for found in run_ranks(2, never_ended, timeout=60):
        assert "compress() was given None, so nothing ends the step" in found


def replaced(*args: Any, **kwargs: Any) -> Any:
    """Stand in for another library's version of a function of Megatron's."""


def a_seam_that_somebody_replaced() -> str:
    from megatron.core.pipeline_parallel import p2p_communication

    own_loops.start(1)
    model = own_loops.build(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p_communication, "_p2p_ops", replaced)
        return said(lambda: optimus_cc_ext.compress(model, None, SC))


def test_whoever_replaced_a_seam_is_named() -> None:
    for found in run_ranks(2, a_seam_that_somebody_replaced, timeout=60):
        assert f"{__name__}.replaced has replaced it" in found and "functools.wraps" in found


def switched_off() -> bool:
    own_loops.start(2)
    vanilla, model = own_loops.build(2), own_loops.build(2)
    own_loops.pass_of(vanilla)
    for config in (None, OptimusConfig()):
        with optimus_cc_ext.compress(model, None, config) as handle, handle.step(1, measured=True) as step:
            own_loops.pass_of(model)
            step.done(applied=True)
            handle.load_state_dict(handle.state_dict())
            assert handle.metrics() == handle.state_dict() == {}
    return own_loops.digest(vanilla) == own_loops.digest(model)


def test_off_is_a_handle_that_does_nothing() -> None:
    assert run_ranks(2, switched_off, timeout=60) == [True] * 2
