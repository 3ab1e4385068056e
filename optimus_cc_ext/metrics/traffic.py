"""Counters of bytes by class of traffic: raw bytes, which vanilla Megatron would have sent, and sent bytes.

A point-to-point message counts once, at its sender; `collectives/legs.py` has the formulas of collectives.
"""

from optimus_cc_ext.config.classes import CLASSES, TrafficClass

BETWEEN_NODES = "between nodes"
"""The name of the bytes of all classes that leave a node."""

FALLBACK = "optimus-cc/compressed by torch"
"""Tag of the text that says why torch compresses in place of Triton's kernels."""


class Traffic:
    """Counters of one process, since its start and since the last report."""

    def __init__(self) -> None:
        self._counts = {traffic: [0, 0] for traffic in CLASSES}
        self._leaving = [0, 0]
        self._reported = self.as_list()

    def add(self, traffic: TrafficClass, raw: tuple[int, float], sent: tuple[int, float]) -> None:
        """Count one transfer, by its bytes and those of them that leave this rank's node (`legs.Bytes`): `raw` as
        vanilla Megatron would send it, `sent` as it was sent.
        """
        for index, (nbytes, leaving) in enumerate((raw, sent)):
            self._counts[traffic][index] += nbytes
            self._leaving[index] += round(leaving)

    @property
    def leaving(self) -> tuple[int, int]:
        """The (raw, sent) bytes that left this rank's node since the start; zeros if nodes are not known."""
        raw, sent = self._leaving
        return raw, sent

    @property
    def bytes(self) -> tuple[int, int]:
        """The (raw, sent) bytes of all classes since the start."""
        raw, sent = map(sum, zip(*self._counts.values(), strict=True))
        return raw, sent

    def total(self) -> dict[TrafficClass, tuple[int, int]]:
        """Return the (raw, sent) bytes by class since the start."""
        return {traffic: (raw, sent) for traffic, (raw, sent) in self._counts.items()}

    def as_list(self) -> list[int]:
        """Return the counters in the order of `CLASSES`, raw before sent; the last two are of bytes between nodes."""
        return [value for count in (*self._counts.values(), self._leaving) for value in count]

    def since_last_report(self) -> list[int]:
        """Return the counters' increments since the last call, in the order of `as_list`."""
        before, self._reported = self._reported, self.as_list()
        return [now - then for now, then in zip(self._reported, before, strict=True)]
