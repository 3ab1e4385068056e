"""Results of a finished quickstart: its page, pictures and summary."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from optimus_cc_ext.tools.data import PreparedData
from optimus_cc_ext.tools.report.comparison import Comparison, relative
from optimus_cc_ext.tools.report.document import Box, Folded, Number, Points, ReportDocument, machine
from optimus_cc_ext.tools.report.record import Record, shares
from scripts.bench.cluster.predicted import planned
from scripts.hosts.network import bits_per_second
from scripts.quickstart.settings import Settings


@dataclass(frozen=True)
class Run:
    """Finished run. `techniques` are those that the hooks' log line says were on; `seconds` include the start."""

    record: Record
    command: str
    flags: tuple[str, ...]
    """Flags of optimus_cc_ext only."""

    techniques: str
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """Both runs. `text` describes the input for people; `no_links` is the reason why there were no hosts, if there were
    none.
    """

    settings: Settings
    no_links: str
    text: str
    data: PreparedData
    preparation_seconds: float
    runs: Mapping[str, Run]

    @cached_property
    def comparison(self) -> Comparison:
        records = {name: run.record for name, run in self.runs.items()}
        return Comparison(records, self.settings.spans, self.settings.vanilla_band, first_is_vanilla=True)

    @property
    def seconds(self) -> float:
        """Seconds of the whole quickstart."""
        return self.preparation_seconds + sum(run.seconds for run in self.runs.values())

    @cached_property
    def speedup(self) -> float:
        """Vanilla's seconds per iteration over the compressed run's: measured on shaped links, or planned for them."""
        vanilla, ours = (median for _, median, _ in next(iter(self.comparison.seconds().values())).values())
        if self.settings.shaped:
            return vanilla / ours
        config = self.settings.config_of(self.runs["compressed"].flags)
        return 1 / planned(self.settings, config, bits_per_second(self.settings.rate), vanilla, ours)

    @property
    def _speed(self) -> tuple[str, str]:
        """The words and the number of the speed-up, or of what is slower."""
        factor = self.speedup
        return ("times as fast", f"{factor:.2f}") if factor >= 1 else ("times as slow", f"{1 / factor:.2f}")

    def numbers(self) -> list[Number]:
        """Return the most important numbers, in the order of importance."""
        settings, comparison = self.settings, self.comparison
        where, run_seconds = next(iter(comparison.seconds().items()))
        vanilla, ours = (median for _, median, _ in run_seconds.values())
        measured = f"{ours:.2f} s an iteration, {vanilla:.2f} s vanilla, medians"
        here = f"{where}: {measured}"
        if settings.shaped:
            *_, (unshaped, free) = comparison.seconds().items()
            without, with_ours = (median for _, median, _ in free.values())
            change = relative(with_ours, without)
            how = "as fast" if abs(change) < 0.01 else f"{abs(change):.0%} {'slower' if change > 0 else 'faster'}"
            speed = (
                f"on {here}; every rank on a host of its own. On {unshaped} it is {how}: {with_ours:.2f} s,"
                f" {without:.2f} s vanilla"
            )
        else:
            speed = (
                f"planned, not measured, for {settings.links}. This machine has none ({self.no_links}). Measured"
                f" {here}, where no run waits for a network"
            )
        everything = shares(comparison.last)[-1]
        losses = [record.validation.last for record in comparison.runs.values()]
        band = (
            f"; the same batches in another order move vanilla's own by {settings.vanilla_band:.2%} (scripts/study)"
            if settings.vanilla_band
            else ""
        )
        bytes_sent = f"{everything.sent / 1e6:.1f} of {everything.raw / 1e6:.1f} MB an iteration, all ranks"
        loss = f"{losses[1]:.4f} compressed, {losses[0]:.4f} vanilla, same seed and text{band}"
        return [
            Number(*self._speed, speed),
            Number("bytes sent", f"{everything.ratio:.1%}", f"of vanilla's: {bytes_sent}"),
            Number("validation loss", f"{relative(losses[1], losses[0]):+.2%}", loss),
        ]

    def write(self, folder: Path) -> None:
        """Write pictures, CSV, index.html and summary.json."""
        self.document().write(folder, page="index.html")
        (folder / "summary.json").write_text(json.dumps(self.summary(), default=str, indent=1) + "\n")

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json: JSON values, and paths."""
        return asdict(self) | {
            "format": 3, "seconds": self.seconds, "speedup": self.speedup, "shaped": self.settings.shaped,
            "comparison": self.comparison.summary(), "machine": machine(), "settings": self.settings.flat(),
        }  # fmt: skip

    def document(self) -> ReportDocument:
        """Return the page's content."""
        settings, data = self.settings, self.data
        times = [f"{name} {run.seconds:.0f} s" for name, run in self.runs.items()]
        tokens = settings.iterations * settings.global_batch * settings.model.sequence
        facts = {
            "text": f"{data.text_bytes / 1e6:.1f} MB in {data.documents:,} documents: {data.tokens:,} tokens",
            "trained on": f"{tokens:,} tokens in each run",
            "model": settings.described,
            "hosts": settings.hosts if settings.shaped else f"none: {self.no_links}",
            "time": f"{self.seconds / 60:.1f} minutes: text {self.preparation_seconds:.0f} s, {', '.join(times)}",
            "machine": ", ".join(f"{name} {value}" for name, value in machine().items()),
        }
        techniques = [(name, run.techniques) for name, run in self.runs.items()]
        flags = f"Flags of ours: {' '.join(self.runs['compressed'].flags)}"
        speed, _, loss = numbers = self.numbers()
        kind = "" if settings.shaped else " (planned)"
        return self.comparison.document(
            f"{speed.value} {speed.name}{kind} on {settings.links}, {loss.name} {loss.value}",
            f"The same GPT ({settings.parameters / 1e6:.1f} million parameters), the same seed and the same text,"
            f" trained twice by NVIDIA Megatron on {settings.arranged}: once vanilla, once with its traffic compressed"
            f" by optimus_cc_ext. {settings.iterations} iterations each, on {self.text}.",
            before=[Box("", numbers, "grid")],
            after=[
                Box("What was on", [Points(techniques, flags)]),
                Box("Text, hosts and time", [Points([*facts.items()])]),
                Folded("The two command lines", {name: run.command for name, run in self.runs.items()}),
            ],
        )
