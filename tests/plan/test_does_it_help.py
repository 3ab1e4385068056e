"""docs/does-it-help.md shows what its commands print, and its page and picture are those that they write.

`python -m tests.plan.test_does_it_help` prints the table by network anew.
"""

import csv
import io
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from string import Template

import pytest

from optimus_cc_ext.tools import cli
from scripts.planned import __main__ as planned
from scripts.planned.grid import NETWORKS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "does-it-help.md"
UNBROKEN = "\N{NO-BREAK SPACE}"


def section(title: str) -> str:
    """Return the text of the section that begins with this heading."""
    return PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of the planner in the bash blocks of `text`, with variables replaced."""
    variables: dict[str, str] = {}
    for block in re.findall(r"^ *```bash\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\\\n", " ", block).splitlines():
            words = shlex.split(Template(line.partition(">")[0]).safe_substitute(variables))
            if words and (found := re.fullmatch(r"([A-Z0-9]+)=(.*)", words[0], re.DOTALL)):
                variables[found[1]] = found[2]
            elif words[:1] == ["optimus-cc"]:
                yield words[1:]
            elif words[:3] == ["python", "-m", "scripts.planned"]:
                yield words[3:]


def printed(words: list[str]) -> list[dict[str, str]]:
    """Return the rows that a plan prints as CSV."""
    place = words.index("--")
    with redirect_stdout(io.StringIO()) as out:
        assert cli.main([*words[:place], "--format", "csv", *words[place:]]) == 0
    return list(csv.DictReader(io.StringIO(out.getvalue())))


def shown(row: dict[str, str], name: str) -> str:
    """Return a gain with its band as the page writes it."""
    gain, least, most = (round(float(row[f"{name}: {bound} %"])) + 0 for bound in ("gain", "from", "to"))
    return f"{gain} ({least} to {most})".replace(" ", UNBROKEN)


BY_NETWORK = "By network and model"
OVER_NODES = "A mixture of experts over several nodes"


def table_of_networks() -> list[str]:
    """Return the rows of the table by network, one column for each command."""
    columns = [printed(words) for words in commands(section(BY_NETWORK))]
    rows = []
    for name, title in NETWORKS.items():
        cells = [shown(row, "yours") for column in columns for row in column if row["link"] == name]
        rows += [f"| {title} | {' | '.join(cells)} |"] if cells else []
    return rows


def test_each_column_by_network_is_what_its_command_prints() -> None:
    rows = table_of_networks()
    assert len(rows) >= 6 and "\n".join(rows) in section(BY_NETWORK), "\n".join(rows)


def test_the_figures_of_a_mixture_over_nodes_are_planned_on_4_nodes_and_on_8() -> None:
    (*_, words) = commands(section(BY_NETWORK))
    text = " ".join(section(OVER_NODES).split())
    for nodes, batch in (("4", "256"), ("8", "512")):
        here = [batch if word == "256" else "link=100gbe" if word.startswith("link=") else word for word in words]
        here[here.index("--nodes") + 1] = nodes
        (balanced,) = printed(here)
        (both,) = printed([*here, "--expert-dispatch-format", "int8"])
        (hybrid,) = printed([*here, "--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep"])
        vanilla, gain, seconds = (
            float(balanced["vanilla s"]),
            float(balanced["yours: gain %"]),
            float(hybrid["vanilla s"]),
        )
        assert f"in int8 | {gain:.0f} %" in text and f"int8` | {float(both['yours: gain %']):.0f} %" in text
        assert f"HybridEP (`flex`) | none | {100 * (1 - seconds / vanilla):.0f} %" in text
        if nodes == "4":
            assert (
                f"`alltoall` takes {vanilla:.0f} s an iteration, with `balanced` {vanilla * (1 - gain / 100):.0f}"
                in text
            )
            assert f"HybridEP takes {seconds:.0f} s" in text


def test_the_readme_shows_cells_of_the_page() -> None:
    columns = {"GPT 8.3B": 2, "Llama 3 8B": 3, "Qwen3 30B": 5}
    page = {row[0]: row[1:] for row in rows_of(section(BY_NETWORK))}
    header, *rows = [row for row in rows_of((ROOT / "README.md").read_text()) if len(row) == 5]
    assert header[2:] == list(columns) and len(rows) >= 5
    to = f"{UNBROKEN}to{UNBROKEN}"
    for network, _, *cells in rows[1:]:
        assert [cell.replace("\N{NON-BREAKING HYPHEN}", to).replace(" (", f"{UNBROKEN}(") for cell in cells] == [
            page[network][column - 1] for column in columns.values()
        ]  # fmt: skip
    (over_nodes,) = re.findall(
        r"`balanced` saves (\d+) % on 100 GbE", " ".join((ROOT / "README.md").read_text().split())
    )
    assert page["100 GbE"][5].startswith(f"{over_nodes}{UNBROKEN}")


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of all table rows."""
    return [[cell.strip(" ") for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_page_and_the_picture_are_what_their_command_writes(tmp_path: Path) -> None:
    (words,) = commands(PAGE.read_text().partition("\n## ")[0])
    for file in ("docs/plan.html", "docs/images/does-it-help.svg"):
        written = tmp_path / Path(file).name
        assert planned.main([str(written) if word == "$FILE" else word for word in words]) == 0
        assert written.read_text() == (ROOT / file).read_text(), f"write {file} anew with the command of {PAGE.name}"


if __name__ == "__main__":
    print(*table_of_networks(), sep="\n")
