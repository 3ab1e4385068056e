"""A run that ends early says once at its end what compression did, as one does that ends as planned."""

import functools
import os
import re
import signal
from collections.abc import Callable

import pytest

from tests.megatron.runs import STOPPED
from tests.megatron.specs import Run, RunSpec, full, in_ci, uses


def before_step(number: int, act: Callable[[], object]) -> None:
    """Call `act` when the step with this number, from 1, begins."""
    from megatron.training import training

    original = training.train_step

    @functools.wraps(original)
    def train_step(*args: object, iteration: int, **kwargs: object) -> object:
        if iteration + 1 == number:
            act()
        return original(*args, iteration=iteration, **kwargs)

    training.train_step = train_step


def send_sigterm() -> None:
    if os.environ["RANK"] == "0":  # Megatron tells the other ranks
        os.kill(os.getpid(), signal.SIGTERM)


def start_earlier() -> None:
    from megatron.training import training

    training._TRAIN_START_TIME -= 120


def stop() -> None:
    raise SystemExit("the data has ended")


SHORT_RUN = RunSpec(
    name="-", layout=(2, ""), ours="--dp-compression-format int8",
    flags="--train-iters 8 --log-interval 2 --eval-iters 0",
)  # fmt: skip
AT_INTERVAL = SHORT_RUN.but("ended at an interval", flags="--exit-interval 5")
AT_LOG = SHORT_RUN.but("ended at a logging interval", flags="--exit-interval 4")
AT_LAST = SHORT_RUN.but("ended at its last iteration", flags="--exit-interval 8")
AFTER_TIME = SHORT_RUN.but(
    "ended after a time", flags="--exit-duration-in-mins 1 --log-interval 100",
    before=(functools.partial(before_step, 1, start_earlier),),
)  # fmt: skip
BY_SIGNAL = SHORT_RUN.but(
    "ended by a signal", flags="--exit-signal-handler", before=(functools.partial(before_step, 3, send_sigterm),)
)  # fmt: skip
BY_ERROR = SHORT_RUN.but("ended by an error", before=(functools.partial(before_step, 6, stop),), ends=True)
BEFORE_LOG = SHORT_RUN.but("ended before its first log", before=(functools.partial(before_step, 2, stop),), ends=True)


def said(run: Run) -> list[str]:
    """Return the lines about the whole run, by all ranks."""
    return [line for rank in run.ranks for line in rank.said if re.match(r"\d+ iterations: ", line)]


@pytest.mark.parametrize(
    ("runs", "iterations"),
    [
        pytest.param((AT_INTERVAL,), 5, id="interval"),
        pytest.param((AT_LOG,), 4, id="log", marks=pytest.mark.ci),
        pytest.param((AT_LAST,), 8, id="last", marks=pytest.mark.ci),
        pytest.param((AFTER_TIME,), 1, id="time", marks=pytest.mark.ci),
        pytest.param((BY_SIGNAL,), 3, id="signal", marks=pytest.mark.ci),
    ],
    indirect=["runs"],
)
def test_an_orderly_end_counts_every_iteration(runs: Run, iterations: int) -> None:
    (line,) = said(runs)
    assert re.fullmatch(
        rf"{iterations} iterations: [\d.e-]+ s each; [\d.]+ of [\d.]+ MB \(2\d\.\d %\) sent in each.*on a rank", line
    ), line


@uses(in_ci(BY_ERROR), full(STOPPED))
def test_an_error_ends_with_the_iterations_up_to_the_last_log(runs: Run) -> None:
    # The other ranks may have ended by now, so that nothing more can be collected.
    (line,) = said(runs)
    if runs.spec == STOPPED:  # Megatron's own check of a step ended it
        assert line.startswith("1 iterations: ")
    else:
        assert line.startswith("4 iterations: ") and runs.ranks[0].ended == "the data has ended"


@uses(in_ci(BEFORE_LOG))
def test_an_error_before_the_first_log_is_not_followed_by_an_empty_line(runs: Run) -> None:
    assert said(runs) == [] and runs.ranks[0].ended == "the data has ended"
