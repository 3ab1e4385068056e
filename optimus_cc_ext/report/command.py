"""`optimus-cc report`: the event files of a run, or of two side by side, as tables, pictures and a page."""

from pathlib import Path

from optimus_cc_ext.data.output import check_replaceable, locked, replace
from optimus_cc_ext.report import ReportError, page
from optimus_cc_ext.report.comparison import FILES, Comparison
from optimus_cc_ext.report.record import read_run

__all__ = ["write_report"]


def write_report(folders: list[Path], output: Path) -> None:
    """Write index.html, CSV and pictures into `output`, which appears complete or not at all, and print the tables.

    Raises:
        ReportError: there is no run in a folder, or more than one, or they have nothing in common.
        DataError: `output` holds something else.
    """
    if len(folders) > 2:
        raise ReportError(f"{len(folders)} folders: a run, or two side by side. Give one or two")
    for folder in folders:
        check_replaceable(output, folder.resolve(), {"index.html", *FILES})
    comparison = Comparison(dict(zip(_names(folders), map(read_run, folders), strict=True)))
    first, last = comparison.first.training.iterations, comparison.last.training.iterations
    if not set(first) & set(last):
        raise ReportError(f"{folders[-1]}: no iteration in common with {folders[0]}. Give runs of the same training")
    names = list(comparison.runs)
    title = f"{names[-1]} against {names[0]}" if len(names) > 1 else names[0]
    lead = f"Iterations {first[0]} to {first[-1]}; read from {', '.join(map(str, folders))}."
    with locked(output.absolute()) as partial:
        partial.mkdir()
        text = page.document(title, lead, *comparison.write(partial))
        (partial / "index.html").write_text(text, encoding="utf-8")
        replace(partial, output)
    tables = (comparison.losses(), comparison.times(), comparison.traffic(), comparison.compression())
    print("\n".join(table.markdown() for table in tables if table.rows))
    for said in [*comparison.complaints(), *comparison.missing()]:
        print(f"note: {said}")
    print(f"written: {output / 'index.html'}")


def _names(folders: list[Path]) -> list[str]:
    """As short as tells them apart."""
    words = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, words)) + 1):
        names = ["/".join(each[-length:]) for each in words]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({place})" for place, name in enumerate(names, start=1)]
