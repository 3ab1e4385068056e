"""A vanilla and a compressed run side by side: numbers, tables, pictures, and what does not add up."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optimus_cc_ext.metrics.traffic import TrafficClass
from optimus_cc_ext.report import page
from optimus_cc_ext.report.record import SECONDS, TRAINING, VALIDATION, Record, shares
from optimus_cc_ext.report.table import Table

__all__ = ["PICTURES", "REQUIRED", "Comparison", "relative"]

PICTURES = ("training_loss", "validation_loss", "traffic")
"""Names of the pictures, without `.png` and `.svg`."""

REQUIRED = (
    TRAINING, VALIDATION, SECONDS,
    *(f"optimus-cc/{name.value} {side} bytes" for name in TrafficClass for side in ("raw", "sent")),
)  # fmt: skip
"""Tags that both runs have to have logged."""


def relative(new: float, old: float) -> float:
    """How much larger `new` is than `old`, as a fraction of `old`."""
    return (new - old) / old


@dataclass(frozen=True)
class Comparison:
    """Two runs of the same training that have all tags in `REQUIRED`."""

    vanilla: Record
    compressed: Record

    def complaints(self) -> list[str]:
        """What contradicts itself: "raw" must mean the same in both runs, namely what vanilla really sends."""
        said = []
        for name in (traffic_class.value for traffic_class in TrafficClass):
            sent = self.vanilla.sent(name)
            if self.vanilla.raw(name) != sent:
                said.append(f"{name}: the vanilla run did not send its raw bytes")
            if self.compressed.raw(name) != sent:
                said.append(
                    f"{name}: the compressed run counts {self.compressed.raw(name).mean:,.0f} raw bytes per"
                    f" iteration, the vanilla run sent {sent.mean:,.0f}"
                )
        if self.vanilla.training.iterations != self.compressed.training.iterations:
            said.append("the two runs did not log the same iterations")
        return said

    def losses(self) -> Table:
        """Losses at the end, and the time of an iteration."""
        rows = {
            "final training loss": (self.vanilla.training.last, self.compressed.training.last, ".4f"),
            "final validation loss": (self.vanilla.validation.last, self.compressed.validation.last, ".4f"),
            "seconds per iteration (median)": (self.vanilla.seconds.median, self.compressed.seconds.median, ".3f"),
        }
        return Table(("", "vanilla", "compressed", "difference"), [
            (name, f"{old:{form}}", f"{new:{form}}", f"{relative(new, old):+.2%}")
            for name, (old, new, form) in rows.items()
        ], f"After {max(self.vanilla.training.iterations)} iterations")  # fmt: skip

    def traffic(self) -> Table:
        """By class, of the compressed run."""
        return Table(("", "raw MB", "sent MB", "sent / raw"), [
            (share.name, f"{share.raw / 1e6:.3f}", f"{share.sent / 1e6:.3f}", f"{share.ratio:.1%}")
            for share in shares(self.compressed)
        ], "Traffic per iteration, all ranks", "Logical bytes. Raw: what vanilla Megatron sends, which the vanilla run"
            " confirms.", last_is_sum=True)  # fmt: skip

    def blocks(self, folder: Path, remark: str = "") -> list[str]:
        """Draw the pictures into `folder`; return what the page shows. `remark`: what to know about the seconds."""
        # Here, not above: matplotlib takes a second, which tables need not wait for.
        from optimus_cc_ext.report.pictures import loss_curves, save, traffic_bars

        old, new = self.vanilla, self.compressed
        figures = (
            loss_curves("Training loss", old.training, new.training),
            loss_curves("Validation loss", old.validation, new.validation),
            traffic_bars(shares(new)),
        )
        for name, figure in zip(PICTURES, figures, strict=True):
            save(figure, folder, name)
        training, validation, traffic = (page.card("", page.picture(folder / f"{name}.svg")) for name in PICTURES)
        everything, table = shares(new)[-1], self.traffic()
        return [
            page.alarm("Cross-check failed: do not trust the bytes", self.complaints()),
            page.grid(
                page.number(
                    "traffic sent", f"{everything.ratio:.1%}",
                    f"of what vanilla sends: {everything.sent / 1e6:.1f} of {everything.raw / 1e6:.1f} MB an iteration",
                ),
                page.number(
                    "final validation loss", f"{relative(new.validation.last, old.validation.last):+.2%}",
                    f"{new.validation.last:.4f} compressed, {old.validation.last:.4f} vanilla",
                ),
                page.number(
                    "seconds per iteration", f"{new.seconds.median:.2f}",
                    f"{old.seconds.median:.2f} vanilla; medians. {remark}",
                ),
            ),
            page.grid(training, validation, wide=True),
            page.grid(traffic, page.card(table.title, table.html()), wide=True),
        ]  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """The comparison in plain JSON values."""
        losses = {"vanilla": self.vanilla.validation.last, "compressed": self.compressed.validation.last}
        return {
            "final_validation_loss": losses,
            "final_validation_loss_change": relative(losses["compressed"], losses["vanilla"]),
            "traffic_bytes_per_iteration": {s.name: asdict(s) | {"ratio": s.ratio} for s in shares(self.compressed)},
            "raw_equals_what_vanilla_sent": not self.complaints(),
            "complaints": self.complaints(),
        }
