"""Rules for which state of a checkpoint a run restores, and which it resets; pure functions, the same on every rank."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from optimus_cc_ext.checkpoint.state_files import Manifest
from optimus_cc_ext.config import OptimusConfig, flag_of
from optimus_cc_ext.config.classes import CLASSES, PIPELINE_BACKWARD, class_named

_NO_STATE = "the checkpoint does not contain it"


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """The decision about the state of each technique: restored, reset or ignored."""

    restored: tuple[str, ...] = ()
    reset: dict[str, str]
    """The techniques that start with empty residuals and new factors, each with the reason."""

    ignored: tuple[str, ...] = ()
    """The techniques that are off, or keep no state in their format, but have state in the checkpoint."""

    iteration: int | None = None
    """The iteration at whose end the state was saved."""

    def without(self, reasons: Mapping[str, str]) -> "Resumption":
        """Return this decision with further techniques reset: the keys of `reasons`, each with its reason."""
        kept = tuple(technique for technique in self.restored if technique not in reasons)
        return replace(self, restored=kept, reset={**self.reset, **reasons})

    def lines(self) -> list[str]:
        """Return the log lines: one about state that is restored, and one for each reason why other state is reset or
        ignored.
        """
        lines = []
        if self.restored:
            lines.append(f"the state of {_and(self.restored)} is restored from iteration {self.iteration}")
        for reason in dict.fromkeys(self.reset.values()):
            names = _and(technique for technique in self.reset if self.reset[technique] == reason)
            lines.append(f"warning: the state of {names} is reset (empty residuals, new factors): {reason}")
        if self.ignored:
            lines.append(f"the checkpoint's state of {_and(self.ignored)} is ignored: this run does not use it")
        return lines


def settings_of(config: OptimusConfig, messages: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return, for each technique that is on and keeps state, the settings that its state depends on.

    Args:
        messages: the settings that the shapes of gradient messages depend on, by description.
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
    iteration: int | None,
    unwanted: str | None,
) -> Resumption:
    """Decide which techniques' state is restored, reset or ignored.

    Args:
        settings: `settings_of` this run.
        topology: this run's layout, by description.
        manifest: the description of the checkpoint's files; None: the checkpoint has none.
        checkpoint: the mark in Megatron's own files; None: they were saved without Optimus-CC.
        iteration: the iteration in Megatron's own files; None: unknown.
        unwanted: the reason why the state is not to be restored in any case, if there is one.
    """
    saved = manifest.techniques if manifest else {}

    def why_afresh(technique: str) -> str | None:
        if unwanted:
            return unwanted
        if manifest is None:
            return _NO_STATE
        if checkpoint is None:
            # A run without Optimus-CC resumed from an earlier checkpoint, and saved this iteration again.
            return "the checkpoint was overwritten without Optimus-CC, and the state belongs to the earlier one"
        if checkpoint != manifest.checkpoint or iteration not in (None, manifest.iteration):
            return (
                f"the checkpoint contains the state of another save (iteration {manifest.iteration}): two runs saved "
                "into one folder, or a run ended while it saved an iteration again"
            )
        if difference := _difference(topology, manifest.topology):
            return difference
        if technique not in saved:
            return _NO_STATE
        return _difference(settings[technique], saved[technique])

    reset = {technique: reason for technique in settings if (reason := why_afresh(technique))}
    return Resumption(
        restored=tuple(technique for technique in settings if technique not in reset),
        reset=reset,
        ignored=tuple(technique for technique in saved if technique not in settings),
        iteration=manifest.iteration if manifest else None,
    )


def _difference(now: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """Return the first setting that differs between this run and the checkpoint, in words; None if all are equal."""
    for name, value in now.items():
        if saved.get(name) != value:
            return f"{name} is {value} here and {saved.get(name)} in the checkpoint"
    return None


def _and(techniques: Iterable[str]) -> str:
    return " and ".join(class_named(technique).tag for technique in techniques)
