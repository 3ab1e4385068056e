"""What of a checkpoint's state a run goes on from, and what it starts afresh: rules only, the same on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optimus_cc_ext.checkpoint.state_files import Manifest
from optimus_cc_ext.config import OptimusConfig

__all__ = ["Resumption", "decide", "settings_of"]

_NAMES = {"compressed_backprop": "compressed backpropagation", "dp_compression": "data-parallel compression"}


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """By technique: what happens to its state."""

    restored: tuple[str, ...] = ()
    reset: Mapping[str, str]
    """The techniques that start with empty residuals and fresh factors, and why."""

    ignored: tuple[str, ...] = ()
    """The techniques that are off, but have state in the checkpoint."""

    def without(self, reasons: Mapping[str, str]) -> "Resumption":
        """The same, but these techniques start afresh."""
        kept = tuple(technique for technique in self.restored if technique not in reasons)
        return Resumption(restored=kept, reset={**self.reset, **reasons}, ignored=self.ignored)

    def lines(self) -> list[str]:
        """What there is to say to the user, one line for each reason."""
        by_reason: dict[str, list[str]] = {}
        for technique, reason in self.reset.items():
            by_reason.setdefault(reason, []).append(_NAMES[technique])
        lines = [
            f"warning: the state of {' and '.join(names)} starts afresh (empty residuals, new factors): {reason}"
            for reason, names in by_reason.items()
        ]
        if self.ignored:
            names = " and ".join(_NAMES.get(technique, technique) for technique in self.ignored)
            lines.append(f"the checkpoint's state of {names} is ignored: switched off in this run")
        return lines


def settings_of(config: OptimusConfig, messages: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By technique that is on and remembers anything: the settings without which its state means nothing.

    Args:
        messages: what the shapes of gradient messages depend on, in words.
    """
    settings: dict[str, dict[str, Any]] = {}
    if config.compressed_backprop:
        settings["compressed_backprop"] = {
            "--compressed-backprop-rank": config.compressed_backprop_rank,
            "--compressed-backprop-messages": config.compressed_backprop_messages,
            "--lazy-error-propagation": config.lazy_error_propagation,
            **messages,
        }
    if config.dp_compression:
        settings["dp_compression"] = {
            "--dp-compression-rank": config.dp_compression_rank,
            "--dp-compression-stages": config.dp_compression_stages,
            "--dp-error-feedback": config.dp_error_feedback,
        }
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
    if unwanted:
        whole = unwanted
    elif manifest is None:
        whole = "the checkpoint has no state of it"
    elif checkpoint is None:
        # Somebody trained on without us from an earlier checkpoint, and passed this iteration again.
        whole = "the checkpoint was written again without Optimus-CC, and the state is of the one before"
    else:
        whole = _difference(topology, manifest.topology) or ""
    reset: dict[str, str] = {}
    for technique, now in settings.items():
        if whole:
            reset[technique] = whole
        elif technique not in saved:
            reset[technique] = "the checkpoint has no state of it"
        elif difference := _difference(now, saved[technique]):
            reset[technique] = difference
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
