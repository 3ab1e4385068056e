"""What of a checkpoint's state a run goes on from, and what it starts afresh: rules only, the same on every rank."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from optimus_cc_ext.checkpoint.state_files import Manifest
from optimus_cc_ext.config import OptimusConfig, flag_of
from optimus_cc_ext.config.classes import CLASSES, PIPELINE_BACKWARD, class_named

__all__ = ["Resumption", "decide", "settings_of"]

_NO_STATE = "the checkpoint has no state of it"


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """By technique: what happens to its state."""

    restored: tuple[str, ...] = ()
    reset: Mapping[str, str]
    """The techniques that start with empty residuals and fresh factors, and why."""

    ignored: tuple[str, ...] = ()
    """The techniques that are off, or remember nothing in their format, but have state in the checkpoint."""

    def without(self, reasons: Mapping[str, str]) -> "Resumption":
        """The same, but these techniques start afresh."""
        kept = tuple(technique for technique in self.restored if technique not in reasons)
        return Resumption(restored=kept, reset={**self.reset, **reasons}, ignored=self.ignored)

    def lines(self) -> list[str]:
        """What there is to say to the user, one line for each reason."""
        lines = []
        for reason in dict.fromkeys(self.reset.values()):
            names = _and(technique for technique in self.reset if self.reset[technique] == reason)
            lines.append(f"warning: the state of {names} starts afresh (empty residuals, new factors): {reason}")
        if self.ignored:
            lines.append(f"the checkpoint's state of {_and(self.ignored)} is ignored: this run has no use for it")
        return lines


def settings_of(config: OptimusConfig, messages: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By technique that is on and remembers anything: the settings without which its state means nothing.

    Args:
        messages: what the shapes of gradient messages depend on, in words.
    """
    settings: dict[str, dict[str, Any]] = {}
    for traffic in filter(config.remembers, CLASSES):
        format = config.format_of(traffic)
        settings[traffic.name] = {traffic.format_flag: format} | {
            flag_of(name): getattr(config, name)
            for name in traffic.settings
            if format == "low-rank" or not traffic.fields[name].metadata["low_rank_only"]
        }
    if PIPELINE_BACKWARD.name in settings:
        settings[PIPELINE_BACKWARD.name] |= messages
    return settings


def decide(
    settings: Mapping[str, Mapping[str, Any]],
    topology: Mapping[str, Any],
    manifest: Manifest | None,
    *,
    checkpoint: str | None,
    unwanted: str | None,
) -> Resumption:
    """What happens to the state of every technique.

    Args:
        settings: `settings_of` this run.
        topology: this run's layout, in words.
        manifest: of the checkpoint's files; None: it has none.
        checkpoint: the mark that Megatron's own files carry; None: they were saved without Optimus-CC.
        unwanted: why the state is not to be restored in any case, if so.
    """
    saved = manifest.techniques if manifest else {}

    def why_afresh(technique: str) -> str | None:
        if unwanted:
            return unwanted
        if manifest is None:
            return _NO_STATE
        if checkpoint is None:
            # Somebody trained on without us from an earlier checkpoint, and passed this iteration again.
            return "the checkpoint was written again without Optimus-CC, and the state is of the one before"
        if difference := _difference(topology, manifest.topology):
            return difference
        if technique not in saved:
            return _NO_STATE
        # Checkpoints that do not say the format hold low-rank.
        low_rank = {class_named(technique).format_flag: "low-rank"}
        return _difference(settings[technique], low_rank | saved[technique])

    reset = {technique: reason for technique in settings if (reason := why_afresh(technique))}
    return Resumption(
        restored=tuple(technique for technique in settings if technique not in reset),
        reset=reset,
        ignored=tuple(technique for technique in saved if technique not in settings),
    )


def _difference(now: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """The first thing that is not what it was."""
    for name, value in now.items():
        if saved.get(name) != value:
            return f"{name} is {value} here and {saved.get(name)} in the checkpoint"
    return None


def _and(techniques: Iterable[str]) -> str:
    return " and ".join(class_named(technique).phrase for technique in techniques)
