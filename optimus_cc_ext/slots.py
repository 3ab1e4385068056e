"""Sizes of the ring of message buffers (collectives/ring.py): one rule for the runtime, doctor and the planner."""

from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import NamedTuple

from optimus_cc_ext.errors import FlagError

SLOTS = 4
"""Number of slots. With three, reductions are ended so early that on a GPU with one queue of work they hold up the
backward pass (tests/megatron/test_streams.py).
"""

GRAIN = 64
"""Blocks between two places at which most ranges of values can be cut into slices."""


def slot_bytes(megabytes: float, slots: int = SLOTS) -> int:
    """Return the most bytes of a slot if all slots together have `megabytes`: larger exchanges are cut into slices."""
    return int(megabytes * 1e6) // slots


def check_slot(least: int, limit: int, what: str) -> None:
    """Check that the smallest possible slice, `what` of `least` bytes, fits into a slot of `limit` bytes.

    Raises:
        FlagError: it does not; the message names the smallest bound that works.
    """
    if least > limit:
        needed = SLOTS * least / 1e6
        raise FlagError("--message-memory", f"messages of {what} need {needed:.2f} MB", f"Give at least {ceil(needed)}")


def slices(slot: Callable[[int, int], int], blocks: int, values: int, limit: int, unit: int) -> tuple[int, int]:
    """Return the number of slices of an exchange that does not fit into a slot, and the largest distance between two
    possible cuts, in blocks.

    Args:
        slot: returns the bytes of messages of so many blocks and dense values.
        blocks: most blocks of a message; `values`: most dense values.
        limit: most bytes of a slot.
        unit: the distance at which the encoder computes the same bits as for one message.
    """
    count = 2
    while unit > 1 and slot(unit, 0) > limit // 4:
        unit //= 2
    while slot(-(-blocks // count) + unit - 1, -(-values // count)) > limit:
        count += 1
    return count, unit


class Exchanged(NamedTuple):
    """Bytes of the slices of one exchange."""

    nbytes: Sequence[int]
    together: bool
    """True if others of its kind are under way beside it; otherwise one follows the other."""


def slots_bytes(kinds: Iterable[Iterable[Exchanged]], slots: int = SLOTS) -> int:
    """Return the total size of the slots, in bytes. Exchanges of different `kinds` never run at the same time."""
    most = largest = 0
    for exchanges in map(list, kinds):
        alone = max((len(each.nbytes) for each in exchanges if not each.together), default=0)
        most = max(most, alone, sum(len(each.nbytes) for each in exchanges if each.together))
        largest = max([largest, *(nbytes for each in exchanges for nbytes in each.nbytes)])
    return min(slots, most) * largest
