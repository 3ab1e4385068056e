"""Law: exact means exact. Through all that happens to a run, the exact gather keeps vanilla's losses and weights to the
bit, and the host waits for the lengths of messages once a step.
"""

import functools
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

import optimus_cc_ext
from tests.forked_ranks import run_ranks
from tests.megatron import interventions, own_loops
from tests.megatron import runs as table
from tests.megatron.specs import RunSpec, full, in_ci, uses
from tests.megatron.test_trial import SHARDED, forced
from tests.megatron_runs import last_stage_losses

LOADED_AT = 5
"""Iteration, counted from 0, before which the weights are replaced."""

EXACT = "--param-gather-format exact"
STEPS = 11


def load_weights(*, whole: bool = True) -> None:
    """Load other weights into model and optimizer between two iterations, as a user's training loop does.

    Args:
        whole: True if the parameters are gathered before, as by Megatron's own code that reads or writes weights.
    """
    from megatron.training import get_args, training

    step = training.train_step

    @functools.wraps(step)
    def loading_step(*args: Any, **kwargs: Any) -> Any:
        model, optimizer = args[2], args[3]
        if get_args().curr_iteration == LOADED_AT:
            if whole:
                training.disable_forward_pre_hook(model, optimizer=optimizer)
            for chunk in model:
                state = {name: 0.9 * each for name, each in chunk.state_dict().items() if torch.is_tensor(each)}
                chunk.load_state_dict(state, strict=False)
            optimizer.reload_model_params()
            if whole:
                training.enable_forward_pre_hook(model)
        return step(*args, **kwargs)

    training.train_step = loading_step


def refit() -> None:
    """After each step, gather the weights for a rollout, and move them away and back, as in RL."""
    from megatron.training import training

    step = training.train_step

    @functools.wraps(step)
    def refitting_step(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        for chunk in args[2]:
            chunk.start_param_sync(force_sync=True)
            for data in (buffer.param_data for buffer in chunk.buffers):
                kept = data.clone()
                data.fill_(torch.nan).copy_(kept)
        return result

    training.train_step = refitting_step


_noted: list[str] = []


def note_waits() -> None:
    """Note where lengths of messages are asked for and waited for, and where Megatron's train_step waits by itself."""
    from megatron.training import training

    from optimus_cc_ext.techniques import exact_gather

    longest, agrees = exact_gather.Longest, training.logical_and_across_model_parallel_group
    start, settle = longest.__init__, longest.settle

    def noting_start(self: Any, *args: Any, **kwargs: Any) -> None:
        _noted.append("asked")
        start(self, *args, **kwargs)

    def noting_settle(self: Any) -> None:
        if self._found is not None:
            _noted.append("waited")
        settle(self)

    def noting_agreement(*args: Any, **kwargs: Any) -> Any:
        result = agrees(*args, **kwargs)
        _noted.append("Megatron")
        return result

    longest.__init__, longest.settle = noting_start, noting_settle
    training.logical_and_across_model_parallel_group = noting_agreement


def noted_waits(model: list[torch.nn.Module], optimizer: Any) -> list[str]:
    return _noted


# A skipped step, and one whose loss is not a number; an evaluation and a save; weights that the user loads.
VANILLA = RunSpec(
    name="whole life", layout=(4, ""), before=(interventions.poison, load_weights),
    flags=f"--bf16 --loss-scale 1 --no-check-for-nan-in-loss-and-grad {table.OVERLAPPED} {table.SMALL_BUCKETS} "
    f"{table.SHORT} --lr 1e-4 {table.EVALUATED} --save {{here}} --save-interval 4 --ckpt-format torch_dist",
)  # fmt: skip
GATHER, PRESET = (VANILLA.but(f"whole life, {ours}", ours=ours) for ours in (EXACT, "--optimus-cc exact"))
RESUMED = [table.resumed(run, 4) for run in (VANILLA, GATHER)]
WITH_TWO = [replace(run, name=f"{run.name}, two replicas", layout=(2, "")) for run in RESUMED]
REFITTED = [
    replace(run, name=f"{run.name}, refitted", before=(interventions.poison, refit)) for run in (VANILLA, GATHER)
]
LOADED_TOO_EARLY = GATHER.but(
    "weights loaded before the gather", before=(functools.partial(load_weights, whole=False),), ends=True
)


@uses(in_ci(VANILLA, GATHER), full(VANILLA, PRESET), full(*RESUMED), full(*WITH_TWO), full(*REFITTED))
def test_steps_evaluations_saves_resumes_and_loaded_weights_keep_every_bit(runs):
    vanilla, ours = runs
    whole = len(vanilla.ranks[0].steps) == 8
    assert last_stage_losses(ours.ranks) == last_stage_losses(vanilla.ranks)
    for mine, theirs in zip(ours.ranks, vanilla.ranks, strict=True):
        assert mine.evaluation_losses == theirs.evaluation_losses
        assert [step.weights for step in mine.steps] == [step.weights for step in theirs.steps]
        assert mine.weights == theirs.weights
        assert any(step.skipped for step in mine.steps) == whole
        raw, sent = mine.ours.traffic["parameter gather"]
        assert 0 < sent < 0.8 * raw, "the first gather and those after a skipped step and a save are Megatron's own"


def bytes_by_step() -> list[tuple[bool, int]]:
    """Return for each step of a trial that chooses exact, and some more, whether it was on trial, and the bytes of its
    messages.
    """
    os.environ["OPTIMUS_CC_NODE"] = "ranks:1"
    own_loops.start(1)
    model, found = own_loops.build(1, **SHARDED), []
    optimizer = own_loops.optimizer_of(model)
    for group in optimizer.param_groups:
        group["lr"] = 1e-7  # few values differ; the short lanes of so small a model take 0.75 bits a value
    with forced(dense=False), optimus_cc_ext.compress(model, optimizer, "exact") as handle:
        for step in range(STEPS):
            own_loops.pass_of(model, batch=step)
            tried = handle._session.trial.open
            optimizer.step()
            found.append((tried, sum(shards.sent_bytes for shards in handle._session.parameters.buckets)))
        layout, buckets = handle._session.layout, handle._session.parameters.buckets
        assert {shards.plan.bits for shards in buckets} == {layout.exact_bits}, "plans have the run's forecast"
    return found


@pytest.mark.ci
def test_a_trial_compares_messages_that_are_as_long_as_at_the_peak_and_no_later_step_has_them() -> None:
    first, second = run_ranks(2, bytes_by_step)
    assert first == second and [tried for tried, _ in first] == [True] * 8 + [False] * (STEPS - 8)
    on_trial, later = ({nbytes for tried, nbytes in first if tried == way} for way in (True, False))
    assert max(later) < 0.5 * min(on_trial)


@uses(full(LOADED_TOO_EARLY))
def test_weights_that_are_written_before_a_pending_gather_end_the_run_with_a_sentence(runs):
    ended = [rank.ended for rank in runs.ranks if rank.ended is not None]
    assert ended and all("between the step and its gather" in str(reason) for reason in ended)


OVERLAPPED = GATHER.but("waits, overlapped", before=(note_waits,), probe=noted_waits)
AT_ONCE = table.EXACT_DIFFERENCES[0].but("waits, at once", before=(note_waits,), probe=noted_waits)
OF_EXPERTS = replace(
    table.EXPERTS_GATHERED, name="waits, experts", before=(note_waits,), probe=noted_waits, ours=EXACT,
    flags=f"{table.EXPERTS_GATHERED.flags} --overlap-grad-reduce --overlap-param-gather",
)  # fmt: skip


@uses(in_ci(OVERLAPPED), full(AT_ONCE), full(OF_EXPERTS))
def test_the_host_waits_for_lengths_once_a_step_and_with_overlap_after_megatrons_own_wait(runs):
    groups = 2 if runs.spec.name == "waits, experts" else 1
    for rank in runs.ranks:
        steps = " ".join(rank.probed).split("Megatron")[:-1]
        assert len(steps) == len(rank.steps)
        for step in steps:
            assert step.count("asked") <= groups and step.count("waited") <= groups
        assert sum(step.count("waited") for step in steps) > 0
        if "--overlap-param-gather" in runs.spec.flags:
            # What a step asks for, the next one waits for: Megatron has waited in between.
            assert all("waited" not in step.partition("asked")[2] for step in steps)
