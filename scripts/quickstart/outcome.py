"""A finished quickstart: its page, pictures and summary."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optimus_cc_ext.data import PreparedData
from optimus_cc_ext.report import page
from optimus_cc_ext.report.comparison import Comparison, relative
from optimus_cc_ext.report.record import Record
from scripts.quickstart.settings import Settings

__all__ = ["Outcome", "Run", "time_remark"]

_NOTICEABLE = 0.05
"""Differences in time below this are the machine's noise."""


@dataclass(frozen=True)
class Run:
    """One finished run. `techniques` is the hooks' own word for what was on; `seconds` includes the start."""

    record: Record
    command: str
    techniques: str
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """Both runs. `text` is how a person would call the input; `remarks` see `settings.remarks`."""

    settings: Settings
    remarks: tuple[str, ...]
    text: str
    data: PreparedData
    preparation_seconds: float
    runs: Mapping[str, Run]

    @property
    def comparison(self) -> Comparison:
        return Comparison(self.runs["vanilla"].record, self.runs["compressed"].record)

    @property
    def seconds(self) -> float:
        """Of everything together."""
        return self.preparation_seconds + sum(run.seconds for run in self.runs.values())

    def write(self, folder: Path) -> None:
        """Pictures, index.html and summary.json."""
        (folder / "index.html").write_text(self._page(folder), encoding="utf-8")
        (folder / "summary.json").write_text(json.dumps(self.summary(), default=str, indent=1) + "\n")

    def summary(self) -> dict[str, Any]:
        """The content of summary.json: JSON values, and paths."""
        return asdict(self) | {
            "format": 2, "seconds": self.seconds, "comparison": self.comparison.summary(), "machine": page.machine(),
        }  # fmt: skip

    def _page(self, folder: Path) -> str:
        settings, data = self.settings, self.data
        times = [f"{name} {run.seconds:.0f} s" for name, run in self.runs.items()]
        facts = {
            "text": f"{data.text_bytes / 1e6:.1f} MB in {data.documents:,} documents: {data.tokens:,} tokens",
            "trained on": f"{settings.iterations * settings.global_batch * settings.sequence:,} tokens in each run",
            "model": settings.model,
            "time": f"{self.seconds / 60:.1f} minutes: text {self.preparation_seconds:.0f} s, {', '.join(times)}",
            "machine": ", ".join(f"{name} {value}" for name, value in page.machine().items()),
        }
        techniques = {name: run.techniques for name, run in self.runs.items()}
        commands = {name: run.command for name, run in self.runs.items()}
        return page.document(
            "Optimus-CC on Megatron, side by side",
            f"The same GPT ({settings.parameters / 1e6:.1f} million parameters), the same seed and the same text,"
            f" trained twice by NVIDIA Megatron on {settings.layout}: once vanilla, once with Optimus-CC."
            f" {settings.iterations} iterations each, on {self.text}.",
            *self.comparison.blocks(folder, time_remark(self.comparison)),
            page.card("What was on", page.points(techniques, " ".join(self.remarks))),
            page.card("Text and time", page.points(facts)),
            page.card("", page.folded("The two command lines", commands)),
        )


def time_remark(comparison: Comparison) -> str:
    """What the seconds mean: here no network is slow, so compression has nothing to win back."""
    change = relative(comparison.compressed.seconds.median, comparison.vanilla.seconds.median)
    why = "all ranks share one machine, where no network has to be waited for"
    if change > _NOTICEABLE:
        return f"Compression does not pay here: an iteration takes {change:.0%} longer, because {why}."
    if change < -_NOTICEABLE:
        return f"An iteration is {-change:.0%} shorter; do not take it for a speed-up of a cluster: {why}."
    return f"An iteration takes as long either way: {why}."
