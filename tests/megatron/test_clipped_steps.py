"""Law: what was clipped is remembered clipped, in Megatron's own training loop."""

from typing import Any

import torch

import optimus_cc_ext
from tests.megatron.optimus_runs import PP2_DP2, install, remembered, run_optimus

OUTLIER = 4
"""The iteration, counted from 0, whose loss is multiplied by 100 in the second run."""

ITERATIONS = OUTLIER + 11
FLAGS = [
    *("--compressed-backprop", "--compressed-backprop-rank", "4", "--residual-across-iterations", "carry"),
    *("--dp-compression", "--dp-compression-rank", "4", "--clip-grad", "1", "--train-iters", str(ITERATIONS)),
]

_norms: list[list[float]] = []


def _install_with_an_outlier(factor: float) -> None:
    """Multiply one iteration's loss by `factor`, and note the norms of all residuals after each."""
    from megatron.training import training

    from optimus_cc_ext import pretrain_gpt

    install()
    masked_loss, train = pretrain_gpt.masked_loss, training.train

    def loss(*args: Any) -> Any:
        total, tokens, report = masked_loss(*args)
        return (total * factor if len(_norms) == OUTLIER else total), tokens, report

    def noting_train(*args: Any, **kwargs: Any) -> Any:
        train_step = training.train_step  # wrapped by now

        def noting(*args: Any, **kwargs: Any) -> Any:
            result = train_step(*args, **kwargs)
            session = optimus_cc_ext.current_session()
            assert session is not None
            residuals = remembered(session)[::2]
            _norms.append([float(torch.linalg.vector_norm(residual)) for residual in residuals])
            return result

        training.train_step = noting
        return train(*args, **kwargs)

    pretrain_gpt.masked_loss = loss
    training.train = noting_train


def _noted(model: Any, optimizer: Any) -> list[list[float]]:
    return _norms


def _as_usual() -> None:
    _install_with_an_outlier(1.0)


def _with_outlier() -> None:
    _install_with_an_outlier(100.0)


def test_ten_steps_after_a_batch_of_a_hundred_times_the_usual_norm_no_residual_is_twice_what_it_would_be() -> None:
    usual, outlier = (run_optimus(PP2_DP2, FLAGS, before=before, probe=_noted) for before in (_as_usual, _with_outlier))
    assert max(outlier[0].grad_norms) > 50 * sorted(usual[0].grad_norms)[ITERATIONS // 2]
    for with_it, without in zip(outlier, usual, strict=True):
        assert len(with_it.probed) == ITERATIONS and with_it.probed[0], "every rank remembers something"
        for norm, expected in zip(with_it.probed[OUTLIER + 10], without.probed[OUTLIER + 10], strict=True):
            assert norm < 2 * expected
