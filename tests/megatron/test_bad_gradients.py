"""NaN and Inf in one replica's gradients: nothing of them is kept, all ranks end the step alike, and nothing hangs."""

from typing import Any

import pytest
import torch

import optimus_cc_ext
from tests.megatron.optimus_runs import LOSSY, PP2_DP2, install, remembered, run_optimus
from tests.megatron_runs import hash_of

INF_AT, NAN_AT, ITERATIONS = 1, 3, 6
"""Of the iterations, counted from 0: where a gradient of the first stage is Inf, and where the last stage's are NaN."""

RESUME_TO_DISAMBIGUATE = 16
"""Megatron's exit code for this (core/rerun_state_machine.py)."""

_notes: list[dict[str, Any]] = []
_ended: list[Any] = []


def _poison(replica: int) -> None:
    """Let one replica's gradients be Inf in one iteration and NaN in another, each time as if computed so."""
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.training import get_args

    from optimus_cc_ext import pretrain_gpt

    start_grad_sync, masked_loss = _ParamAndGradBucketGroup.start_grad_sync, pretrain_gpt.masked_loss

    def ill(iteration: int) -> bool:
        return mpu.get_data_parallel_rank() == replica and get_args().curr_iteration == iteration

    def start_with_inf(self: Any, *args: Any, **kwargs: Any) -> None:
        if ill(INF_AT) and mpu.is_pipeline_first_stage():
            for matrix in (p.main_grad for p in self.params if p.main_grad.shape == (256, 64)):
                matrix[3, 5] = torch.inf
        start_grad_sync(self, *args, **kwargs)

    def loss_with_nan(mask: torch.Tensor, token_losses: torch.Tensor) -> Any:
        # On its way back it passes the link between the stages, in epilogue messages too.
        if ill(NAN_AT):
            token_losses.register_hook(lambda gradient: gradient * torch.nan)
        return masked_loss(mask, token_losses)

    _ParamAndGradBucketGroup.start_grad_sync = start_with_inf
    pretrain_gpt.masked_loss = loss_with_nan


def _install_and_poison() -> None:
    _poison(replica=1)
    install()
    from megatron.training import training

    train = training.train

    def noting_train(*args: Any, **kwargs: Any) -> Any:
        # Ours wraps train_step once the flags are known, so the notes are taken around that: when training begins.
        training.train_step = _noting(training.train_step)
        return train(*args, **kwargs)

    training.train = noting_train


def _noting(train_step: Any) -> Any:
    def step(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        session = optimus_cc_ext.current_session()
        assert session is not None
        state = remembered(session)
        model = args[2] if len(args) > 2 else kwargs["model"]
        _notes.append(
            {
                "skipped": bool(result[1]),
                "finite": all(bool(torch.isfinite(t).all()) for t in state),
                "state": [hash_of(t) for t in state],
                "weights": [hash_of(p) for chunk in model for p in chunk.parameters()],
            }
        )
        return result

    return step


def _read_notes(model: Any, optimizer: Any) -> list[dict[str, Any]]:
    return _notes


@pytest.mark.parametrize(
    "layout", [(), ("--use-distributed-optimizer", "--overlap-grad-reduce")], ids=["whole", "sharded and overlapped"]
)
def test_what_is_not_finite_on_one_replica_is_skipped_by_all_and_kept_by_none(layout):
    # A static loss scale makes Megatron skip steps with gradients that are not finite, in bf16 as well.
    flags = ["--bf16", "--loss-scale", "1", "--no-check-for-nan-in-loss-and-grad", "--train-iters", str(ITERATIONS)]
    runs = run_optimus(PP2_DP2, [*flags, *layout, *LOSSY], before=_install_and_poison, probe=_read_notes)
    for run in runs:
        notes = run.probed
        assert [note["skipped"] for note in notes] == [i in (INF_AT, NAN_AT) for i in range(ITERATIONS)]
        assert all(note["state"] and note["finite"] for note in notes)
        for iteration in (INF_AT, NAN_AT):
            before, skipped, after = notes[iteration - 1 : iteration + 2]
            assert skipped["state"] == before["state"] and skipped["weights"] == before["weights"]
            assert after["state"] != before["state"] and after["weights"] != before["weights"]
    losses = [loss for run in runs for loss in run.losses if loss is not None]
    assert len(losses) == 2 * ITERATIONS and max(losses) < 6.5, "finite, and falling from log 512"
    for first, second in (runs[:2], runs[2:]):
        assert [note["weights"] for note in first.probed] == [note["weights"] for note in second.probed]


def _until_the_end() -> None:
    from optimus_cc_ext import pretrain_gpt

    with pytest.raises(SystemExit) as ended:
        pretrain_gpt.main()
    _ended.append(ended.value.code)


def _how_it_ended(model: Any, optimizer: Any) -> list[Any]:
    return _ended


def test_megatrons_own_check_ends_the_run_on_all_ranks(tmp_path):
    # Its rerun state machine repeats the iteration, finds the same again, saves and asks to be started once more.
    save = [
        "--save",
        str(tmp_path),
        "--save-interval",
        "100",
        "--ckpt-format",
        "torch",
        "--train-iters",
        str(ITERATIONS),
    ]
    start = {"before": _install_and_poison, "entry": _until_the_end, "probe": _how_it_ended}
    runs = run_optimus(PP2_DP2, [*save, *LOSSY], **start, timeout=60)
    assert [run.probed for run in runs] == [[RESUME_TO_DISAMBIGUATE]] * 4
    assert all(len(run.losses) == INF_AT + 1 for run in runs)
