"""The compressors' benchmark as a page and pictures."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compressors_timing import Sample
from matplotlib.figure import Figure

__all__ = ["Row", "write_report"]


@dataclass(frozen=True)
class Row:
    """One piece of work that was timed."""

    section: str
    case: str
    """What it was done on: pieces of work of one case are compared."""

    work: str
    sample: Sample
    floor_seconds: float | None = None
    """What the machine allows: bytes at a copy's bandwidth, or products at the best rate."""

    more: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """For the terminal."""
        s = self.sample
        text = f"{self.section}: {self.case}: {self.work}: {s.median * 1e3:.3f} ms"
        return f"{text} ({s.first_quartile * 1e3:.3f} to {s.third_quartile * 1e3:.3f})"


@dataclass(frozen=True)
class Target:
    """A ratio that has to be reached: the fastest work that begins with `against` over ours, where `case` is in it."""

    section: str
    case: str
    ours: str
    against: str
    at_least: float
    on: str


TARGETS = (
    Target("slices", "8.3b, 1024 x 3072, rank 16", "ours, compress", "reference, compress", 5.0, "cpu"),
    Target("orthogonalization", "warm-started, 18 x 3072 x 128", "ours", "hook's _orthogonalize", 5.0, "cpu"),
    Target("orthogonalization", "Gaussian, 18 x 3072 x 128", "ours", "hook's _orthogonalize", 5.0, "cpu"),
    Target("bucket", "18 layers", "ours", "hook, ", 1.3, "cpu"),
    Target("slices", "8.3b, 1024 x 3072, rank 16", "ours, compress", "reference, compress", 15.0, "cuda"),
    Target("slices", "8.3b, 1024 x 3072, rank 16", "ours, decompress", "reference, decompress", 15.0, "cuda"),
    Target("slices", "175b, 2048 x 12288, rank 16", "ours, compress", "reference, compress", 15.0, "cuda"),
    Target("slices", "175b, 2048 x 12288, rank 16", "ours, decompress", "reference, decompress", 15.0, "cuda"),
    Target("bucket", "18 layers", "ours", "hook, ", 20.0, "cuda"),
)

_COLOURS = {"ours": "#2a9d8f", "reference": "#c2453d", "hook": "#e07b1f"}


def write_report(machine: dict[str, Any], rows: list[Row], stem: Path) -> None:
    """STEM.md with the tables, STEM-slices.png, STEM-bucket.png and STEM-layers.png of what was measured."""
    device = stem.name.rsplit("-", 1)[1]
    parts = ["# Compressors", "", ", ".join(f"{name}: {value}" for name, value in machine.items()) + ".", ""]
    parts += ["Medians of repetitions in turn, on a CPU each contender in processes of its own. One run.", ""]
    crowded, all_of_them = (sum(getattr(row.sample, of) for row in rows) for of in ("crowded", "repetitions"))
    parts += [f"Threads shared a core in {crowded} of {all_of_them} repetitions.", ""] if device == "cpu" else []
    parts += _targets(rows, device)
    for section, draw in (
        ("slices", _draw_slices), ("orthogonalization", None), ("bucket", _draw_bucket), ("layers", _draw_layers),
        ("capture", None),
    ):  # fmt: skip
        found = [row for row in rows if row.section == section]
        parts += [f"## {section}", ""]
        if not found:
            parts += ["not measured", ""]
            continue
        if draw is not None:
            picture = stem.with_name(f"{stem.name}-{section}.png")
            figure = draw(found)
            figure.savefig(picture, dpi=150)
            parts += [f"![{section}]({picture.name})", ""]
        parts += [*_table(found), ""]
    stem.with_suffix(".md").write_text("\n".join(parts), encoding="utf-8")


def _targets(rows: list[Row], device: str) -> list[str]:
    lines = ["| device | what | case | times faster | wanted |", "| --- | --- | --- | --- | --- |"]
    for target in TARGETS:
        found = {
            row.work: row.sample.median for row in rows if row.section == target.section and target.case in row.case
        }
        against = [seconds for work, seconds in found.items() if work.startswith(target.against)]
        measured = target.on == device and target.ours in found and against
        ratio = f"{min(against) / found[target.ours]:.2f}" if measured else "not measured"
        what = f"{target.section}: {target.ours} against {target.against.rstrip(', ')}"
        lines.append(f"| {target.on} | {what} | {target.case} | {ratio} | {target.at_least:g} |")
    return [*lines, ""]


def _table(rows: list[Row]) -> list[str]:
    further = sorted({key for row in rows for key in row.more})
    header = ["case", "work", "ms", "quartiles", "of ours", "floor, ms", "over floor", *further]
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for row in rows:
        s = row.sample
        ours = _ours(row, rows)
        quartiles = f"{s.first_quartile * 1e3:.3f} to {s.third_quartile * 1e3:.3f}"
        cells = [
            row.case, row.work, f"{s.median * 1e3:.3f}", quartiles,
            f"{s.median / ours.sample.median:.2f}" if ours else "",
            f"{row.floor_seconds * 1e3:.3f}" if row.floor_seconds else "",
            f"{s.median / row.floor_seconds:.2f}" if row.floor_seconds else "",
            *(f"{row.more[key]:.4g}" if key in row.more else "" for key in further),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _ours(row: Row, rows: list[Row]) -> Row | None:
    """Our row of the same case, and of the same half of the work."""
    half = row.work.split(", ")[1:2] if row.section == "slices" else []
    wanted = ", ".join(["ours", *half])
    return next((other for other in rows if other.case == row.case and other.work == wanted), None)


def _draw_slices(rows: list[Row]) -> Figure:
    """Figure 14: Gbit/s of the slice, by compression rank."""
    models = list(dict.fromkeys(row.case.split(",")[0] for row in rows))
    figure = Figure(figsize=(4.2 * len(models), 3.4), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        mine = [row for row in rows if row.case.split(",")[0] == model]
        for work in dict.fromkeys(row.work for row in mine):
            points = [(int(r.case.rsplit(" ", 1)[1]), r.more["gbit"] / r.sample.median) for r in mine if r.work == work]
            colour, style = _COLOURS[work.split(",")[0]], "--" if "decompress" in work and "and" not in work else "-"
            axes.plot(*zip(*points, strict=True), style, color=colour, label=work, marker="o", ms=3, lw=1.4)
        axes.set(title=model, xlabel="compression rank", ylabel="Gbit/s", yscale="log")
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=7, frameon=False)
    return figure


def _draw_bucket(rows: list[Row]) -> Figure:
    """Seconds of the whole bucket, beside the floor of its products."""
    figure = Figure(figsize=(5.5, 0.6 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    names, seconds = [row.work for row in rows], [row.sample.median for row in rows]
    axes.barh(names, seconds, color=[_COLOURS[name.split(",")[0]] for name in names])
    axes.axvline(rows[0].floor_seconds or 0.0, color="#24292f", ls="--", lw=1, label="its products at the best rate")
    axes.set(xlabel=f"seconds: {rows[0].case}")
    axes.invert_yaxis()
    axes.legend(fontsize=7, frameon=False)
    return figure


def _draw_layers(rows: list[Row]) -> Figure:
    """Milliseconds and operators by the number of layers."""
    figure = Figure(figsize=(7.5, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    layers = [row.more["layers"] for row in rows]
    times = [row.sample.median * 1e3 for row in rows]
    left.plot(layers, times, marker="o", color=_COLOURS["ours"], label="measured")
    left.plot(layers, [times[0] * n / layers[0] for n in layers], ls="--", color="#8a94a0", label="linear in bytes")
    left.set(xlabel="layers", ylabel="ms per reduction", ylim=(0, None))
    left.legend(fontsize=7, frameon=False)
    right.plot(layers, [row.more["operators"] for row in rows], marker="o", color=_COLOURS["ours"])
    right.set(xlabel="layers", ylabel="operators per reduction", ylim=(0, None))
    return figure
