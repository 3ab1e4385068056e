"""Law: state follows the step, in Megatron's own training loop."""

from typing import Any

import torch

import optimus_cc_ext
from tests.megatron.optimus_runs import PP2_DP2, install, remembered, run_optimus

SKIPPED = 2
"""The iteration, counted from 0, whose update is skipped."""

_kept: list[list[torch.Tensor]] = []


def _install_and_skip() -> None:
    """Let the optimizer find an overflow in one iteration, and note our state after each."""
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.training import training

    prepare, calls = FP32Optimizer.prepare_grads, []

    def finding_overflow(self: Any) -> bool:
        calls.append(None)
        return prepare(self) or len(calls) == SKIPPED + 1

    FP32Optimizer.prepare_grads = finding_overflow
    install()
    validated = training.train_step

    def noting(original: Any) -> Any:
        def train_step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            session = optimus_cc_ext.current_session()
            assert session is not None
            _kept.append([t.clone() for t in remembered(session)])
            return result

        return train_step

    # Ours wraps train_step once the flags are known, so the notes are taken around that: when training begins.
    train = training.train

    def noting_train(*args: Any, **kwargs: Any) -> Any:
        assert training.train_step is not validated, "Optimus-CC wraps train_step before training begins"
        training.train_step = noting(training.train_step)
        return train(*args, **kwargs)

    training.train = noting_train


def _states(model: Any, optimizer: Any) -> list[list[torch.Tensor]]:
    return _kept


def test_a_skipped_update_leaves_residuals_and_factors_as_they_were():
    flags = [
        "--compressed-backprop",
        "--compressed-backprop-rank",
        "4",
        "--residual-across-iterations",
        "carry",
        "--dp-compression",
        "--dp-compression-rank",
        "4",
    ]
    runs = run_optimus(PP2_DP2, [*flags, "--train-iters", "4"], before=_install_and_skip, probe=_states)
    for run in runs:
        states = run.probed
        assert len(states) == 4 and states[0]
        for before, after, later in zip(states[SKIPPED - 1], states[SKIPPED], states[SKIPPED + 1], strict=True):
            assert torch.equal(before, after), "the skipped step left no trace"
            assert not torch.equal(after, later), "the next one did"
