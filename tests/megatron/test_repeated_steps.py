"""Megatron's rerun state machine, with errors injected by its own flags: a repeated pass feeds no residual twice."""

from pathlib import Path
from typing import Any

import torch

from tests.megatron.checkpoint_runs import CB_FE_SC, assert_goes_on, install_and_watch, run, saving_facts

TORCH_DIST = ["--ckpt-format", "torch_dist"]
# The states of dropout's generators are not what they were before the step in a checkpoint that Megatron 0.19 saves in
# the middle of one (the second restoring of them is of the very dict that the repeated pass changed): so, without.
NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]
# Of Megatron's checks only one whose failure does not end the run: what it repeats, it then goes on from.
NOT_FATAL = ["--check-for-large-grads", "--no-check-for-nan-in-loss-and-grad"]
EVERY_STEP = ["--rerun-mode", "validate_results", "--error-injection-rate", "1", "--error-injection-type"]

_passes: list[int] = []
_ended: list[Any] = []


def count_passes() -> None:
    """Note how many forward-backward passes every step has."""
    from megatron.training import training

    install_and_watch()
    get_schedule = training.get_forward_backward_func

    def noting(*args: Any, **kwargs: Any) -> Any:
        forward_backward = get_schedule(*args, **kwargs)

        def counted(**arguments: Any) -> Any:
            _passes.append(1)
            return forward_backward(**arguments)

        return counted

    training.get_forward_backward_func = noting


def passes_and_facts(model: list[torch.nn.Module], optimizer: Any) -> dict[str, Any]:
    return saving_facts(model, optimizer) | {"passes": len(_passes), "ended": _ended}


def until_it_ends() -> None:
    """Our entry; Megatron ends a run whose results it doubts by leaving the process."""
    from optimus_cc_ext import pretrain_gpt

    try:
        pretrain_gpt.main()
    except SystemExit as ended:
        _ended.append(ended.code)


def test_repeated_passes_leave_no_trace_and_a_checkpoint_before_the_update_resumes_exactly(tmp_path: Path) -> None:
    argv = [*CB_FE_SC, *TORCH_DIST, *NO_DROPOUT]
    whole = run([*argv, *NOT_FATAL], before=count_passes, probe=passes_and_facts)
    assert whole[0].probed["passes"] == 8

    repeated = run([*argv, *NOT_FATAL, *EVERY_STEP, "transient_error"], before=count_passes, probe=passes_and_facts)
    # The first step of a run is never checked.
    assert [r.probed["passes"] for r in repeated] == [8 + 7] * 4
    assert_goes_on(repeated, whole, 0)

    # An error that shows again in the second pass: Megatron saves before the update, and leaves with status 16.
    stopped = run(
        [*argv, *EVERY_STEP, "persistent_error", "--save", str(tmp_path), "--save-interval", "100"],
        before=count_passes, probe=passes_and_facts, entry=until_it_ends,
    )  # fmt: skip
    assert [(r.probed["passes"], r.probed["ended"]) for r in stopped] == [(1 + 2, [16])] * 4
    assert [len(r.losses) for r in stopped] == [2] * 4, "it left in the second step"
    resumed = run([*argv, "--load", str(tmp_path), "--rerun-mode", "disabled"])
    assert_goes_on(resumed, whole, 1)
