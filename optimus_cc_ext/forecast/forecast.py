"""Forecast of compression's gain on this run's links: measured in the first iterations, predicted, and printed.

The first forward-backward pass warms up and the second is timed. Before the third, all ranks measure their links and
compressors and exchange the results, so that every rank computes the same forecast. With `--dp-compression-stages auto`
the forecast decides which stages compress their gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch

from optimus_cc_ext.announce import COMPRESSION_STATE, MESSAGE_BUFFERS, say
from optimus_cc_ext.config import OptimusConfig, classes
from optimus_cc_ext.config.optimus_config import CLASSES_BY_FLAG
from optimus_cc_ext.config.options import flag_of
from optimus_cc_ext.config.presets import saves_nothing
from optimus_cc_ext.forecast.measure import EMBEDDING, GATHER, GRADIENTS, Measured, measure
from optimus_cc_ext.forecast.timeline import (
    INDIFFERENT,
    IterationTimes,
    RankCost,
    Rate,
    Switches,
    iteration,
    useful_stages,
)
from optimus_cc_ext.metrics.stopwatch import Stopwatch
from optimus_cc_ext.techniques.schedule import Schedule
from optimus_cc_ext.techniques.session import Session

__all__ = ["Forecast", "Forecaster", "Measured", "forecast"]

_TIMED_PASS = 1
"""Number of the timed forward-backward pass, counted from 0. The pass before it allocates, compiles and connects."""

_FLAGS = {each.tag: each.flag for each in CLASSES_BY_FLAG if each.tag != GATHER}
"""Flags that switch on the classes of traffic whose seconds are compared, in the order of the log lines."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicted seconds of an iteration, with and without each class's compression, and the rates that were
    measured.
    """

    plain: IterationTimes
    """Times of an iteration in which nothing is compressed or fused."""

    ours: IterationTimes
    without: Mapping[str, float]
    """Seconds from the iteration's beginning to its reduced gradients if one class, the key, were not compressed."""

    compressed_stages: frozenset[int]
    """Stages whose data-parallel gradients are compressed."""

    link: float
    """Bytes per second between stages; 0 with one stage."""

    replicas: float
    """Bytes per second of sums over replicas; 0 with one replica."""

    exchange: float = 0.0
    """Bytes per second of an all-to-all over replicas; 0 if the run uses none."""

    inside: float = 0.0
    """Bytes per second of sums inside a node; 0 if gradients are compressed in one level."""

    across: float = 0.0
    """Bytes per second of an all-to-all between nodes; 0 if gradients are compressed in one level."""

    experts: float = 0.0
    """Bytes per second of an all-to-all over the ranks of the experts; 0 if no token is compressed."""

    one_level: bool = False
    """True if gradients in two levels would take longer than in one, so that `auto` takes one."""

    warmups: Mapping[str, float]
    """Share of the iterations in which a class waits for the end of its warm-up, by flag. The prediction assumes none.
    """

    without_gain: Mapping[str, str] = field(default_factory=dict)
    """Log lines, by class, for classes that no rank sends in fewer bytes. They replace a predicted gain."""

    lacking: Mapping[int, int] = field(default_factory=dict)
    """Bytes that a GPU of a stage lacks for state and messages, by stage. Such a stage is not compressed."""

    def lines(self) -> list[str]:
        """Return the log lines: the measured links, the gain of each class, and the classes that do not pay."""
        rates = (
            (self.link, "between stages"), (self.replicas, "among replicas"), (self.exchange, "in their all-to-all"),
            (self.inside, "inside a node"), (self.across, "in an all-to-all between nodes"),
            (self.experts, "in the experts' all-to-all"),
        )  # fmt: skip
        links = ", ".join(f"{rate / 1e6:.1f} MB/s {where}" for rate, where in rates if rate)
        plain, ours = self.plain.reduced, self.ours.reduced
        lines = [
            f"forecast from measured times ({links}): the gradients of an iteration are reduced after "
            f"{1e3 * ours:.0f} ms instead of {1e3 * plain:.0f} ms ({_change(ours, plain)})",
            *(f"forecast: {self._verdict(name)}" for name in self.without),
        ]
        if self.plain.after_step:
            milliseconds = 1e3 * self.ours.after_step
            lines.append(
                f"forecast: {GATHER}: {milliseconds:.0f} ms after the optimizer's step, {self._gather_verdict()}"
            )
        for stage, nbytes in sorted(self.lacking.items()):
            lines.append(
                f"forecast: stage {stage} is not compressed: its GPUs lack {nbytes / 1e6:.0f} MB for "
                f"{COMPRESSION_STATE} and {MESSAGE_BUFFERS}. --compression-state-dtype bf16 halves the state, and "
                "--dp-compression-format int4 has none"
            )
        if self.warmups:
            flags = ", ".join(f"{flag} {share:g}" for flag, share in self.warmups.items())
            lines.append(
                f"forecast: the times are those after the warm-up ({flags}); a class "
                "gains nothing before its warm-up ends"
            )
        return lines

    def _gather_verdict(self) -> str:
        plain, ours = self.plain.after_step, self.ours.after_step
        if ours == plain:
            return "as in vanilla Megatron"
        pays = "" if ours < plain else f". It does not pay here: give {classes.PARAM_GATHER.format_flag} dense"
        return f"instead of {1e3 * plain:.0f} ms ({_change(ours, plain)}){pays}"

    def _verdict(self, name: str) -> str:
        if name in self.without_gain:
            return self.without_gain[name]
        title = f"{name}, {'fused' if name == EMBEDDING else 'compressed'}"
        without, ours, where, cure = self.without[name], self.ours.reduced, "", ""
        if name == GRADIENTS:
            if not self.compressed_stages:
                return f"{title}: no stage's reduction is worth compressing"
            chosen = sorted(self.compressed_stages)
            where = f" on {len(chosen)} of {len(self.ours.ends)} stages ({', '.join(map(str, chosen))})"
            cure = ", or give --dp-compression-stages auto"
        change = f"{title}: {1e3 * (ours - without):+.0f} ms ({_change(ours, without)}){where}"
        if ours > without * (1 + INDIFFERENT):
            return f"{change}. It does not pay here: leave out {_FLAGS[name]}{cure}"
        return change if ours < without * (1 - INDIFFERENT) else f"{change}, within measurement noise"


def forecast(
    everyone: Sequence[Measured], schedule: Schedule, config: OptimusConfig, stages: frozenset[int] | None
) -> Forecast:
    """Predict an iteration, with and without each class that is switched on.

    Args:
        everyone: the measurements of all ranks.
        schedule: the passes and messages of an iteration.
        config: the configuration, which says which classes are switched on.
        stages: the stages whose data-parallel gradients are compressed; None: choose them.
    """
    ranks, nowhere = [m.cost for m in everyone], frozenset[int]()
    on, lacking = Switches.of(config, schedule.stages), dict[int, int]()
    one_level = (
        stages is None and config.dp_compression_levels == "auto" and _is_faster_in_one_level(everyone, schedule, on)
    )
    if one_level:
        ranks = [m.in_one_level or m.cost for m in everyone]
    if GRADIENTS not in on.stages:
        stages = nowhere
    elif stages is None:
        stages = useful_stages(ranks, schedule, on, GRADIENTS)
        most = {stage: max(m.lacking for m in everyone if m.cost.stage == stage) for stage in stages}
        lacking = {stage: nbytes for stage, nbytes in most.items() if nbytes}
        stages -= lacking.keys()
    switches = on.where(GRADIENTS, stages)
    waiting = {row: getattr(config, f"{row.name}_warmup", 0.0) for row in classes.CLASSES if config.is_on(row)}
    return Forecast(
        plain=iteration(ranks, schedule, Switches({})),
        ours=iteration(ranks, schedule, switches),
        without={
            name: iteration(ranks, schedule, switches.where(name, nowhere)).reduced
            for name in _FLAGS
            if name in on.stages
        },
        compressed_stages=stages,
        link=_mean_rate([m.link for m in everyone]),
        replicas=_mean_rate([m.replicas for m in everyone]),
        exchange=_mean_rate([m.exchange for m in everyone]),
        inside=_mean_rate([m.inside for m in everyone]),
        across=_mean_rate([m.across for m in everyone]),
        experts=_mean_rate([m.experts for m in everyone]),
        one_level=one_level,
        lacking=lacking,
        without_gain={
            row.tag: saves_nothing(config, row)
            for row in classes.CLASSES
            if config.format_of(row) == "low-rank" and _shrinks_nowhere(ranks, row.tag)
        },
        warmups={flag_of(f"{row.name}_warmup"): share for row, share in waiting.items() if share},
    )


def _is_faster_in_one_level(everyone: Sequence[Measured], schedule: Schedule, on: Switches) -> bool:
    """Return whether an iteration that compresses gradients on all stages is shorter with one level than with two."""
    if GRADIENTS not in on.stages or all(m.in_one_level is None for m in everyone):
        return False
    everywhere = on.where(GRADIENTS, frozenset(range(schedule.stages)))
    two, one = (
        iteration(ranks, schedule, everywhere).reduced
        for ranks in ([m.cost for m in everyone], [m.in_one_level or m.cost for m in everyone])
    )
    return one < two


def _shrinks_nowhere(ranks: Sequence[RankCost], name: str) -> bool:
    """Return whether a class sends bytes, and no rank sends fewer of them when it is compressed."""
    costs = [cost for rank in ranks for cost in rank.classes if cost.name == name and cost.dense.nbytes]
    return bool(costs) and all(cost.compressed.nbytes >= cost.dense.nbytes for cost in costs)


def _mean_rate(rates: Sequence[Rate | None]) -> float:
    known = [rate.bytes_per_second for rate in rates if rate is not None]
    return fmean(known) if known else 0.0


def _change(new: float, old: float) -> str:
    share = new / old - 1 if old else 0.0
    return f"{100 * abs(share):.1f} % {'less' if share < 0 else 'more'}"


class Forecaster:
    """Forecaster of one session on one rank. Every method is called on all ranks of the model.

    It holds no reference to the session: the hooks keep one forecaster per session, in a map whose keys are weak, and a
    reference from the value to its key would keep both alive.
    """

    def __init__(self) -> None:
        self.stopwatch = Stopwatch()
        """Times the forward and backward steps of a pass, by "forward" and "backward"; on in one pass only."""

        self._passes = 0

    def before_pass(
        self, session: Session, schedule: Schedule, gradient: torch.Tensor | None, device: torch.device
    ) -> None:
        """Begin a forward-backward pass of an iteration: time it, or forecast from the pass that was timed.

        Args:
            session: the session of the forecast, the same in every call.
            schedule: the schedule of this pass.
            gradient: a tensor with the shape and dtype of all activation gradients; None if these are not known
                beforehand.
            device: the device of the tensors in collectives.

        Raises:
            OptimusError: a link failed while it was measured.
        """
        config = session.config
        wanted = config.any_technique and (config.compression_forecast or session.gradients.stages_are_open)
        self.stopwatch.on = wanted and self._passes == _TIMED_PASS
        if wanted and self._passes == _TIMED_PASS + 1:
            self._forecast(session, schedule, gradient, device)
        self._passes += 1

    def _forecast(
        self, session: Session, schedule: Schedule, gradient: torch.Tensor | None, device: torch.device
    ) -> None:
        assert session.grid is not None, "the session has no place in the grid yet"
        everyone = session.grid.gather(measure(session, self.stopwatch, gradient, device))
        found = forecast(everyone, schedule, session.config, session.gradients.compressed_stages)
        if session.gradients.stages_are_open:
            if found.one_level:
                session.gradients.choose_one_level()
            session.gradients.choose_stages(found.compressed_stages)
        if session.grid.is_first:
            _say(session, found)


def _say(session: Session, found: Forecast) -> None:
    lines = found.lines() if session.config.compression_forecast else []
    if session.config.dp_compression_stages == "auto":
        chosen = ", ".join(map(str, sorted(found.compressed_stages))) or "none"
        lines.insert(0, f"--dp-compression-stages auto: compressed stages (of {len(found.ours.ends)}): {chosen}")
        if found.one_level and found.compressed_stages:
            lines.insert(1, "--dp-compression-levels auto: one level, because sums inside a node take longer here")
    for line in lines:
        say(f"optimus-cc: {line}")
