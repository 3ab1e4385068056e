"""Law: state follows the step, under fp16's dynamic loss scaling: skipped steps, halved and doubled scales."""

import functools
import inspect
from typing import Any

import torch

import optimus_cc_ext
from tests.megatron.optimus_runs import PP2_DP2, install, remembered, run_optimus

# So large at first that gradients overflow; doubled again after every two good steps.
OVERFLOWING = "--fp16 --initial-loss-scale 4194304 --hysteresis 1 --loss-scale-window 2 --train-iters 10".split()  # noqa: SIM905
FLAGS = [
    "--compressed-backprop",
    "--compressed-backprop-rank",
    "4",
    "--residual-across-iterations",
    "carry",
    "--dp-compression",
    "--dp-compression-rank",
    "4",
]
SKIPPED_OF_STEP = 1
"""Where `train_step` returns whether the update was skipped."""

_steps: list[dict[str, Any]] = []


def _install_and_note() -> None:
    """Note after each step the loss scale that it ran with, whether it was skipped, and our state."""
    from megatron.training import training

    install()
    train = training.train

    def noting_train(*args: Any, **kwargs: Any) -> Any:
        # Ours wraps train_step once the flags are known; the notes are taken around that.
        training.train_step = noting(training.train_step)
        return train(*args, **kwargs)

    def noting(original: Any) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def train_step(*args: Any, **kwargs: Any) -> Any:
            scale = float(signature.bind(*args, **kwargs).arguments["optimizer"].get_loss_scale())
            result = original(*args, **kwargs)
            _steps.append({"scale": scale, "skipped": bool(result[SKIPPED_OF_STEP]), **_state()})
            return result

        return train_step

    training.train = noting_train


def _state() -> dict[str, list[torch.Tensor]]:
    session = optimus_cc_ext.current_session()
    assert session is not None
    tensors = [t.clone() for t in remembered(session)]
    return {"residuals": tensors[::2], "factors": tensors[1::2]}


def _noted(model: Any, optimizer: Any) -> list[dict[str, Any]]:
    return _steps


def test_residuals_survive_overflows_and_follow_the_loss_scale():
    runs = run_optimus(PP2_DP2, [*FLAGS, *OVERFLOWING], before=_install_and_note, probe=_noted)
    changes = set()
    for run in runs:
        pairs = list(zip(run.probed[:-1], run.probed[1:], strict=True))
        for before, after in pairs:
            ratio = after["scale"] / before["scale"]
            changes.add((ratio, after["skipped"]))
            assert all(torch.isfinite(t).all() for t in [*after["residuals"], *after["factors"]])
            if not after["skipped"]:
                assert not torch.equal(before["factors"][0], after["factors"][0])
                continue
            for old, new in zip(before["residuals"], after["residuals"], strict=True):
                assert torch.equal(old * ratio, new), "nothing of the skipped step, in the units of the new scale"
            for old, new in zip(before["factors"], after["factors"], strict=True):
                assert torch.equal(old, new)
        assert any(t.any() for t in run.probed[-1]["residuals"]), "there was something to scale"
        applied = [step for step in run.probed if not step["skipped"]]
        assert len(applied) >= 2
    assert {ratio for ratio, _ in changes} == {0.5, 1.0, 2.0}, "the scale was halved, kept and doubled"
    assert {skipped for _, skipped in changes} == {True, False}
