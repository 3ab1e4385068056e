"""Cost of the tokens that experts exchange, inside the passes of one rank, from the exchanges of the pass that was
timed.
"""

from dataclasses import dataclass

import torch

from optimus_cc_ext.config import classes
from optimus_cc_ext.forecast.microbenchmark import time_rows
from optimus_cc_ext.forecast.timeline import ClassCost, Link, Rate, Sent, When
from optimus_cc_ext.metrics.stopwatch import Stopwatch
from optimus_cc_ext.techniques.expert_rows import ExpertRows
from optimus_cc_ext.techniques.session import Session

__all__ = ["InPasses"]


@dataclass(frozen=True)
class InPasses:
    """Costs of the exchanges inside a forward and a backward pass of one micro-batch through one model chunk."""

    classes: tuple[ClassCost, ...] = ()

    @classmethod
    def of(cls, session: Session, passes: Stopwatch, rate: Rate, device: torch.device) -> "InPasses":
        """Return the costs on this rank; nothing if no format compresses tokens.

        Args:
            passes: the stopwatch that timed forward and backward passes.
            rate: the rate of the all-to-all over the ranks of the experts.
        """
        if not session.config.sends_rows:
            return cls()
        number = max(1, passes.count("forward"))
        there, back = session.dispatch, session.expert_gradients
        # The tokens of a recomputed layer are sent in the forward pass, and once more in the backward pass.
        again = there.noted.recomputed / max(1, there.noted.exchanges)
        return cls(
            tuple(
                ClassCost(traffic.tag, when, Link.EXPERTS, *_sent(rows, share / number, rate, device))
                for rows, traffic, when, share in (
                    (there, classes.EXPERT_DISPATCH, When.FORWARD_PASS, 1 - again),
                    (there, classes.EXPERT_DISPATCH, When.BACKWARD_PASS, again),
                    (back, classes.EXPERT_GRADIENT, When.BACKWARD_PASS, 1.0),
                )
            )
        )

    def without(self, seconds: float, when: When) -> float:
        """Return `seconds` of a timed pass without the exchanges in it, which were compressed."""
        inside = (cost.compressed for cost in self.classes if cost.when is when)
        return max(0.0, seconds - sum(sent.transfer + sent.encode for sent in inside))


def _sent(rows: ExpertRows, share: float, rate: Rate, device: torch.device) -> tuple[Sent, Sent]:
    """Return the costs of `share` of the exchanges of the timed iteration, dense and compressed."""
    noted = rows.noted
    if not noted.exchanges:
        return Sent(), Sent()
    each = noted.exchanges
    dense, sent = (share * each * rate.seconds(nbytes / each) for nbytes in (noted.raw, noted.sent))
    coding = 0.0 if rows.codec is None else time_rows(rows.codec, noted.rows // each, noted.width, noted.dtype, device)
    return (
        Sent(nbytes=share * noted.raw, transfer=dense),
        Sent(nbytes=share * noted.sent, transfer=sent, encode=share * each * coding),
    )
