"""Trial of a preset: the first steps of a run go dense and compressed by turns, and the faster way stays.

D is a step in which every class on trial is dense, A one in which all of them are compressed. One step of each kind
warms up; then D A A D D A are timed, so that neither way gains from a drift. Ranks do not differ in the answer: it
follows from seconds of which they take the largest together.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from optimus_cc_ext.announce import say
from optimus_cc_ext.config.classes import DP_GRADIENTS, EMBEDDING, PARAM_GATHER, TrafficClass
from optimus_cc_ext.config.trials import LEAST_GAIN
from optimus_cc_ext.metrics.stopwatch import Stopwatch
from optimus_cc_ext.metrics.summary import Compared, in_words
from optimus_cc_ext.techniques.grid import Grid
from optimus_cc_ext.techniques.technique import Technique

DENSE, COMPRESSED = True, False
TIMED = tuple(letter == "D" for letter in "DAADDA" + "ADDAAD")
"""Ways of the timed steps: of the first round, and of the second, for which ranges that overlap ask."""

_ROUND = 6
_MOST_TRIES = 20
_CURE = "--no-compression-trial compresses all the same"


@dataclass
class WaysByTurns:
    """Sequence of ways, as pure bookkeeping: which way a step takes, and which steps count.

    Args:
        untimed: the steps before the timed ones: a dense one, and then compressed ones.
        ahead: true if a step's end encodes the parameters that the next step waits for.
    """

    untimed: int = 2
    ahead: bool = False
    counted: int = 0
    """Number of timed steps that count."""

    tries: int = 0
    """Number of steps that were timed in this round."""

    _warmed: int = 0
    _in_its_way: bool = True
    """True if what the next step waits for from the last one is in the way of the next step."""

    @property
    def timing(self) -> bool:
        """True if the next step is timed."""
        return self._warmed >= self.untimed

    @property
    def dense(self) -> bool:
        """True if the step that begins now is dense."""
        return TIMED[self.counted] if self.timing else self._warmed == 0

    @property
    def gathers_dense(self) -> bool:
        """True if the parameters that this step's end encodes are gathered dense: as the step that waits for them is.

        Nothing that is encoded is under way at the end of a round, when the choice may fall on dense.
        """
        if not self.ahead or (self.timing and not self._in_its_way):
            return self.dense
        if not self.timing:
            after = self._warmed + 1
            return TIMED[0] if after >= self.untimed else COMPRESSED
        after = self.counted + 1
        return DENSE if after % _ROUND == 0 else TIMED[after]

    def ended(self, *, applied: bool, alike: bool) -> bool:
        """Note the end of a step; return whether its seconds count.

        Args:
            applied: False if the optimizer skipped its update.
            alike: False if the step was rerun, or has other micro-batches than the first step that counts.
        """
        if not self.timing:
            self._warmed += applied
            self._in_its_way = applied
            return False
        expected = self._in_its_way or not self.ahead
        counts = applied and alike and expected
        self.tries += 1
        self.counted += counts
        self._in_its_way = applied and counts == expected and not (self.round_is_over and counts)
        return counts

    @property
    def round_is_over(self) -> bool:
        """True if a whole round counts."""
        return self.counted > 0 and self.counted % _ROUND == 0


def by_way(seconds: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the seconds of dense steps, and of compressed ones, of the steps that count in the order of `TIMED`."""
    ways: dict[bool, list[float]] = {DENSE: [], COMPRESSED: []}
    for way, each in zip(TIMED, seconds, strict=False):
        ways[way].append(each)
    return ways[DENSE], ways[COMPRESSED]


def verdict(seconds: Sequence[float], name: str) -> tuple[bool | None, str]:
    """Return whether compression stays, and the seconds of both ways in words. None: another round has to say.

    Args:
        seconds: of the steps that count, in the order of `TIMED`.
        name: the name of the compressed way.
    """
    dense, compressed = by_way(seconds)
    said = ", ".join(
        f"{name} {median(each):.3g} s ({min(each):.3g} to {max(each):.3g})"
        for name, each in (("dense", dense), (name, compressed))
    )
    apart = max(compressed) < min(dense) or max(dense) < min(compressed)
    if not apart and len(seconds) < len(TIMED):
        return None, said
    return median(compressed) <= median(dense) * (1 - LEAST_GAIN), said


def choice_of_8b301ab(state: Mapping[str, Any], stages: int) -> bool | None:
    """Return the choice that a state of commit 8b301ab means, whose `auto` chose stages: all, or none; else None."""
    chosen = state.get("dp_compression", {}).get("stages")
    if chosen is None or 0 < len(chosen) < stages:
        return None
    return bool(chosen)


def send_dense(techniques: Iterable[Technique], classes: Collection[TrafficClass]) -> None:
    """Send these classes as vanilla Megatron does, and all others compressed; called between two steps."""
    names = {traffic.name for traffic in classes}
    for technique in techniques:
        technique.dense = technique.name in names


@dataclass(kw_only=True)
class Trial:
    """Trial of one session on one rank, by the seconds of its steps.

    Args:
        classes: the classes on trial.
        techniques: all techniques, of which the trial switches those of the classes.
        place: the nodes and ranks of the run: a choice holds for as many.
        name: the name of the compressed way.
        counters: returns this rank's (raw, sent) bytes since its start.
        memory: returns the bytes that compression takes on this rank.
    """

    classes: frozenset[TrafficClass]
    techniques: Sequence[Technique]
    grid: Grid
    device: torch.device
    place: tuple[int, int]
    name: str
    counters: Callable[[], tuple[int, int]] = lambda: (0, 0)
    memory: Callable[[], int] = lambda: 0
    ways: WaysByTurns = field(default_factory=WaysByTurns)
    compressed: bool | None = None
    """True if the classes stay compressed; None until the trial has chosen."""

    compared: Compared | None = None
    """Seconds that this run has compared; None: it has not done so."""

    _before: tuple[int, int] = (0, 0)
    """This rank's counters when the step began."""

    _bytes: tuple[int, int] = (0, 0)
    """(raw, sent) bytes of this rank in the last compressed step that counted."""

    _measured: bool = True
    """False if the trial was given up. A resumed run does not take such a choice over."""

    _usual: Any = None
    """The passes of the first step that counts; None: no step counts yet."""

    _stopwatch: Stopwatch = field(default_factory=lambda: Stopwatch(on=True))
    _running: ExitStack = field(default_factory=ExitStack)
    _step: int = 0
    _counted: list[tuple[str, int]] = field(default_factory=list)
    """Name of each counted step's seconds, and its iteration."""

    @property
    def open(self) -> bool:
        return self.compressed is None

    def begin(self) -> bool:
        """Begin a step, or begin it again, in the way that it takes; return whether the trial is open."""
        if not self.open:
            return False
        self._running.close()
        self._step += 1
        send_dense(self.techniques, self.classes if self.ways.dense else ())
        gather, tried = self._named(PARAM_GATHER), PARAM_GATHER in self.classes
        gather.on_trial, gather.dense = tried, tried and self.ways.gathers_dense
        self._before = self.counters()
        if self.ways.timing:
            self._running.enter_context(self._stopwatch.timed(str(self._step), self.device))
        return True

    def is_unusual(self, work: object) -> bool:
        """Return whether a step with these passes cannot be compared with the first one that counts."""
        return self.open and self._usual not in (None, work)

    def end(self, work: object, iteration: int, *, applied: bool, alike: bool) -> None:
        """End a step. Once enough steps count, decide, which is a collective of all ranks of the model.

        Args:
            work: the passes of the step.
            iteration: the number of completed iterations, with this one.
            applied, alike: those of `WaysByTurns.ended`, the same on all ranks.
        """
        if not self.open:
            return
        self._running.close()
        dense, after = self.ways.dense, self.counters()
        counts = self.ways.ended(applied=applied, alike=alike)
        if counts and not dense:
            self._bytes = after[0] - self._before[0], after[1] - self._before[1]
        if counts:
            self._usual = self._usual or work
            self._counted.append((str(self._step), iteration))
        if counts and self.ways.round_is_over:
            self._decide()
        elif self.ways.tries >= _MOST_TRIES:
            self.give_up(f"{_MOST_TRIES} steps have not given {_ROUND} of the same work that were applied at once")

    def _decide(self) -> None:
        read = [self._stopwatch.total(name) for name, _ in self._counted]
        largest = torch.tensor([*read, self.memory(), *self._bytes], dtype=torch.float64).to(self.device)
        self.grid.largest(largest)
        *seconds, memory, raw, sent = largest.tolist()
        self.ways.tries = 0
        choice, said = verdict(seconds, self.name)
        if choice is not None:
            dense, compressed = map(median, by_way(seconds))
            self.compared = Compared(self.name, dense, compressed, choice)
            stays = f"{self.name} stays on" if choice else f"dense from now on ({_CURE})"
            cost = f"up to {in_words(raw, sent)} sent in an iteration, and {memory / 1e6:.1f} MB of memory, on a rank"
            first, last = self._counted[0][1], self._counted[-1][1]
            self._take(choice, f"iterations {first} to {last}: {said}: {stays}; {self.name}: {cost}")

    def give_up(self, reason: str) -> None:
        """End the trial without a measured choice, on all ranks of the model: compression stays on."""
        if self.open:
            self._measured = False
            self._take(True, f"no trial of {self.name}: {reason}. It stays on")

    def _take(self, compressed: bool, line: str) -> None:
        """Take a choice, and say so. What stays dense from now on needs no memory."""
        self.compressed = compressed
        self._named(PARAM_GATHER).on_trial = False
        if self.grid.is_first:
            say(f"optimus-cc: {line}")
        dense = frozenset() if compressed else self.classes
        # The state of another run can be loaded while parameters that a step has encoded wait for the next one.
        waiting = self.ways.ahead and self._step > 0 and not self._named(PARAM_GATHER).dense
        send_dense(self.techniques, dense)
        # The reducers of gradients hold the messages of a tied embedding's own bucket.
        for traffic in dense | ({DP_GRADIENTS} if EMBEDDING in dense else set()):
            if traffic is not PARAM_GATHER or not waiting:
                self._named(traffic).release()

    @property
    def state(self) -> dict[str, Any] | None:
        """The choice, for a checkpoint; None if it is open, or was not measured."""
        if self.open or not self._measured:
            return None
        return {"compressed": self.compressed, "classes": self._names, "place": list(self.place)}

    def resume(self, state: Mapping[str, Any] | None, old: Mapping[str, Any]) -> None:
        """Take over the choice of a checkpoint, if it was made for as many nodes and ranks and the same classes.

        Args:
            state: the `state` of the run that saved.
            old: its whole state, if the run may have been of commit 8b301ab.
        """
        choice = None
        if state is None:
            choice = choice_of_8b301ab(old, self.grid.stages)
        elif (state["classes"], list(state["place"])) == (self._names, list(self.place)):
            choice = state["compressed"]
        if self.open and choice is not None:
            way = f"{self.name} stays on" if choice else f"dense ({_CURE})"
            self._take(choice, f"the trial of the checkpoint's run counts here, too: {way}")

    def _named(self, traffic: TrafficClass) -> Technique:
        return next(technique for technique in self.techniques if technique.name == traffic.name)

    @property
    def _names(self) -> list[str]:
        return sorted(traffic.name for traffic in self.classes)
