"""Picture of what coding costs beside what it saves: one bucket of gradients, coded on a GPU and sent over a line.

    python -m scripts.planned.coding docs/images/coding.svg

The milliseconds of coding are the measured rows of docs/coding-seconds.csv; those of the wire are computed: bits over
the line's rate.
"""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

from optimus_cc_ext.compressors.formats import BLOCK, format_named, section_bytes
from optimus_cc_ext.errors import run_command
from optimus_cc_ext.tools.report import require
from optimus_cc_ext.tools.report.document import Picture
from optimus_cc_ext.tools.report.pictures import INK, PALETTE, side_by_side, tidy

ROWS = Path(__file__).resolve().parents[2] / "docs" / "coding-seconds.csv"
RATES = (25, 100, 200, 400)
"""Rates of a line, in Gbit/s."""

_FP32_BYTES = 4


@dataclass(frozen=True)
class Sent:
    """One way to send the bucket."""

    name: str
    coding: float
    """Milliseconds of encoding and of decoding and adding."""

    nbytes: float

    def wire(self, rate: float) -> float:
        """Return the milliseconds on a line of `rate` Gbit/s."""
        return 8 * self.nbytes / rate / 1e6


def ways(rows: Path = ROWS) -> list[Sent]:
    """Return the dense ways, and the measured ways with coding."""
    with rows.open(newline="") as file:
        measured = list(csv.DictReader(file))
    (nbytes,) = {int(row["bytes"]) for row in measured}
    numel = nbytes // _FP32_BYTES
    dense = [Sent("fp32", 0, nbytes), Sent("bf16", 0, nbytes / 2)]
    return dense + [
        Sent(
            row["format"], float(row["encode_ms"]) + float(row["decode_ms"]),
            section_bytes(-(-numel // BLOCK), 0, format_named(row["format"]).code_bytes, _FP32_BYTES)[2],
        )
        for row in measured
    ]  # fmt: skip


def picture() -> Picture:
    """Draw a panel for each rate."""
    found = ways()
    figure, row = side_by_side(len(RATES), 3.4, 2.0)
    said = []
    for axes, rate in zip(row, RATES, strict=True):
        totals = [sent.coding + sent.wire(rate) for sent in found]
        for place, (sent, total) in enumerate(zip(found, totals, strict=True)):
            coding = axes.barh(place, sent.coding, color=PALETTE[1], height=0.6)
            wire = axes.barh(place, total - sent.coding, left=sent.coding, color=PALETTE[0], height=0.6)
            axes.text(total, place, f" {total:.3g}", va="center", color=INK, fontsize="small")
        axes.set_yticks(range(len(found)), [sent.name for sent in found])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.25 * max(totals))
        axes.set_xlabel("ms")
        tidy(axes, f"{rate} Gbit/s", grid="x")
        said.append(f"{rate} Gbit/s: " + ", ".join(map("{0.name} {1:.3g}".format, found, totals)))
    names = ["coding on an H200, measured", "wire, computed"]
    figure.legend([coding, wire], names, loc="outside upper left", ncols=2, frameon=False, labelcolor=INK)
    measured = ", ".join(f"{each.name} {each.coding:.2f}" for each in found if each.coding)
    words = f"Milliseconds for 1 GB of gradients. {names[0]}: {measured}. With the {names[1]}: {'; '.join(said)}."
    return Picture("one GB of gradients", figure, words)


def main(path: Path) -> None:
    """Write the picture."""
    require()
    path.write_bytes(picture().files[path.suffix[1:]])


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(Path(sys.argv[1]))))
