"""How errors of compressed backpropagation relate to activations (paper section 5.2 and figure 11).

LEP adds the error of micro-batch b to the gradient of micro-batch b + 1, where it meets another activation. What
that costs the weight gradient is the error times the difference of the two activations: small where the two are
orthogonal, and both average to nothing.
"""

from dataclasses import dataclass

import torch

__all__ = ["ErrorStatistics", "StatisticsSums"]


@dataclass(frozen=True)
class StatisticsSums:
    """Over the pairs of consecutive micro-batches of one iteration on one link."""

    pairs: int = 0
    cosine: float = 0.0
    """Of error and activation difference."""

    error_mean: float = 0.0
    difference_mean: float = 0.0


class ErrorStatistics:
    """Pairs each message's error with the difference of two activations, as both become known.

    A stage receives activations ahead of sending gradients, by as many as its warm-up and one at most: what is kept
    is dropped as soon as it was used, or is known not to be needed.
    """

    def __init__(self) -> None:
        self.begin(False)

    def begin(self, on: bool) -> None:
        """An iteration begins, whose statistics are wanted or not."""
        self.on = on
        self._activations: dict[int, torch.Tensor] = {}
        self._errors: dict[int, torch.Tensor] = {}
        self._received = 0
        self._rows: list[torch.Tensor] = []

    def activation(self, received: torch.Tensor) -> None:
        """The input of the next micro-batch, (sequence, micro-batch, hidden), has arrived from the stage before."""
        if self.on:
            self._activations[self._received] = received.detach().flatten().float()
            self._received += 1
            self._pair(self._received - 2)

    def error(self, message: int, error: torch.Tensor) -> None:
        """What compression left out of the gradient of micro-batch `message`; as many values as its input."""
        if self.on:
            self._errors[message] = error.flatten().clone()
            self._pair(message)

    def no_error(self, message: int) -> None:
        """The gradient of micro-batch `message` was sent as it is."""
        self._activations.pop(message, None)

    def sums(self) -> StatisticsSums:
        """What this iteration gave, from the device."""
        if not self._rows:
            return StatisticsSums()
        return StatisticsSums(len(self._rows), *torch.stack(self._rows).double().sum(0).tolist())

    def _pair(self, b: int) -> None:
        if b not in self._errors or b + 1 not in self._activations:
            return
        # Backward passes come in the order of forward ones: nobody will ask for activation b again.
        error = self._errors.pop(b)
        difference = self._activations.pop(b) - self._activations[b + 1]
        cosine = torch.nn.functional.cosine_similarity(error, difference, dim=0)
        self._rows.append(torch.stack([cosine, error.mean(), difference.mean()]))
