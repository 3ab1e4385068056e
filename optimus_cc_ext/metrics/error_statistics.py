"""Statistics of how errors of compressed backpropagation relate to activations (paper section 5.2 and figure 11).

Lazy error propagation adds the error of micro-batch b to the gradient of micro-batch b + 1, where it meets another
activation. The resulting change of the weight gradient is the product of the error and the difference of the two
activations. It is small if the two are orthogonal and both average to zero.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StatisticsSums:
    """Sums over the pairs of consecutive micro-batches of one iteration on one link."""

    pairs: int = 0
    cosine: float = 0.0
    """Sum of the cosines between error and activation difference."""

    error_mean: float = 0.0
    difference_mean: float = 0.0


class ErrorStatistics:
    """Pairing of each message's error with the difference of two consecutive activations, as both become known.

    A stage receives activations ahead of sending gradients, by as many micro-batches as its warm-up has, plus one. A
    stored tensor is dropped as soon as it was used, or is known not to be needed.
    """

    def __init__(self) -> None:
        self.begin(False)

    def begin(self, on: bool) -> None:
        """Begin an iteration; `on` says whether its statistics are collected."""
        self.on = on
        self._activations: dict[int, torch.Tensor] = {}
        self._errors: dict[int, torch.Tensor] = {}
        self._received = 0
        self._rows: list[torch.Tensor] = []

    def activation(self, received: torch.Tensor) -> None:
        """Record the input of the next micro-batch, (sequence, micro-batch, hidden), received from the
        previous stage.
        """
        if self.on:
            self._activations[self._received] = received.detach().flatten().float()
            self._received += 1
            self._pair(self._received - 2)

    def error(self, message: int, error: torch.Tensor) -> None:
        """Record the compression error of the gradient of micro-batch `message`, which has as many values
        as its input.
        """
        if self.on:
            self._errors[message] = error.flatten().clone()
            self._pair(message)

    def no_error(self, message: int) -> None:
        """Record that the gradient of micro-batch `message` was sent uncompressed."""
        self._activations.pop(message, None)

    def sums(self) -> StatisticsSums:
        """Return the sums of this iteration; waits for the device."""
        if not self._rows:
            return StatisticsSums()
        return StatisticsSums(len(self._rows), *torch.stack(self._rows).double().sum(0).tolist())

    def _pair(self, b: int) -> None:
        if b not in self._errors or b + 1 not in self._activations:
            return
        # Backward passes run in the order of the forward passes, so activation b is not needed again.
        error = self._errors.pop(b)
        difference = self._activations.pop(b) - self._activations[b + 1]
        cosine = torch.nn.functional.cosine_similarity(error, difference, dim=0)
        self._rows.append(torch.stack([cosine, error.mean(), difference.mean()]))
