"""Training with half or twice the batch size, or in fewer steps, from which the slopes of vanilla's loss are computed.

torchrun ... -m optimus_cc_ext scripts/study/batches.py NAME <Megatron's flags of the study's training>

Batches are nested: step by step every training takes sequences from the same place of the same order, as many as its
batch has. So two trainings with one seed differ by the number of sequences alone. Each validates on the same sequences.
"""

import functools
import itertools
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from megatron.training import get_args
from torch.utils.data import Subset

from optimus_cc_ext.tools import pretrain_gpt
from scripts.experiments.models import ExperimentError
from scripts.study.law import SLOPES, WINDOW


def scaled(words: Sequence[str], flag: str, by: Fraction) -> list[str]:
    """Return the command line with the flag's last number times `by`.

    Raises:
        ExperimentError: the product is not a whole number of at least 1.
    """
    at = len(words) - list(words)[::-1].index(flag)
    number = int(words[at]) * by
    if number.denominator > 1 or number < 1:
        raise ExperimentError(f"{flag} {words[at]}: {by} of it is not a whole number. Give another one")
    return [*words[:at], str(number), *words[at + 1 :]]


def taken(steps: int, batch: int, window: int) -> list[int]:
    """Return the sequences of a training in their order: of each step's window the first `batch`."""
    return [step * window + place for step in range(steps) for place in range(batch)]


def train(name: str, words: Sequence[str]) -> None:
    """Train with the study's flags, changed as `SLOPES` says for this name."""
    batch, steps = SLOPES[name]
    study = dict(itertools.pairwise(words))
    window = WINDOW * int(study["--global-batch-size"])
    samples = window * int(study["--train-iters"])
    for flag, by in (
        ("--global-batch-size", batch), ("--eval-iters", 1 / batch), ("--train-iters", steps),
        ("--eval-interval", steps),
    ):  # fmt: skip
        words = scaled(words, flag, by)
    sys.argv = [sys.argv[0], *words]
    build = pretrain_gpt.build_datasets

    @functools.wraps(build)  # the copy keeps `is_distributed`, which Megatron reads
    def nested(wanted: Sequence[int], *others: Any, **options: Any) -> tuple[Any, ...]:
        # The order of the sequences depends on their number, which is that of the largest batch.
        training, *rest = build([samples, *wanted[1:]], *others, **options)
        args = get_args()
        order = taken(args.train_iters, args.global_batch_size, window)
        return (training and Subset(training, order), *rest)

    pretrain_gpt.build_datasets = nested
    pretrain_gpt.main()


if __name__ == "__main__":
    _, name, *words = sys.argv
    train(name, words)
