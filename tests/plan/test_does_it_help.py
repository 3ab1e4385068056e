"""docs/does-it-help.md shows what its commands print, and its page and picture are those that they write.

`python -m tests.plan.test_does_it_help` prints the tables anew.
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

from optimus_cc_ext import cli
from optimus_cc_ext.plan.grid import NETWORKS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "does-it-help.md"
UNBROKEN = "\N{NO-BREAK SPACE}"


def section(title: str) -> str:
    """Return the text of the section that begins with this heading."""
    return PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each `optimus-cc` command in the bash blocks of `text`, with variables replaced."""
    variables: dict[str, str] = {}
    for block in re.findall(r"^ *```bash\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\\\n", " ", block).splitlines():
            words = shlex.split(Template(line.partition(">")[0]).safe_substitute(variables))
            if words and (found := re.fullmatch(r"([A-Z0-9]+)=(.*)", words[0], re.DOTALL)):
                variables[found[1]] = found[2]
            elif words[:1] == ["optimus-cc"]:
                yield words[1:]


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


BY_NETWORK = "By network, architecture and Megatron's options"
IN_INT4 = "With gradients in int4"


def table_of_networks(title: str = BY_NETWORK) -> list[str]:
    """Return the rows of a table by network, one column for each command."""
    asked = list(commands(section(BY_NETWORK)))
    if title == IN_INT4:
        asked = [[*words, "--dp-compression-format", "int4"] for words in asked]
    columns = [printed(words) for words in asked]
    rows = []
    for name, title in NETWORKS.items():
        cells = [shown(row, "yours") for column in columns for row in column if row["link"] == name]
        rows += [f"| {title} | {' | '.join(cells)} |"] if cells else []
    return rows


def table_of_levels() -> list[str]:
    """Return the rows of the table of one level and two."""
    one, two = (printed(words) for words in [*commands(section("Two levels"))][:2])
    rows = []
    for row, other in zip(one, two, strict=True):
        chunks = f" x {row['chunks']}" if row["chunks"] != "1" else ""
        layout = f"{row['tensor']} / {row['pipeline']}{chunks} / {row['data']}"
        cells = f"{float(row['vanilla s']):.3g} | {shown(row, 'yours')} | {shown(other, 'yours')}"
        rows.append(f"| {int(row['GPUs']):,} | {NETWORKS[row['link']]} | {layout} | {cells} |")
    return rows


@pytest.mark.parametrize("title", [BY_NETWORK, IN_INT4])
def test_each_column_by_network_is_what_its_command_prints(title: str) -> None:
    rows = table_of_networks(title)
    assert len(rows) >= 6 and "\n".join(rows) in section(title), "\n".join(rows)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_table_of_levels_is_what_its_commands_print() -> None:
    rows = table_of_levels()
    assert "\n".join(rows) in PAGE.read_text(), "\n".join(rows)


def test_the_readme_shows_columns_of_the_page() -> None:
    readme = (ROOT / "README.md").read_text()
    columns = {"GPT 8.3B": 2, "Llama 3 8B": 3, "Llama 3 70B": 4, "Qwen3 30B": 5, "its experts over 4 nodes": 6}
    page = [line.split("|") for line in section(BY_NETWORK).splitlines()]
    lines = {row[1].strip(): row for row in page if len(row) > 7}
    networks = [cell.strip() for cell in re.findall(r"^\| planned.*", readme, re.MULTILINE)[0].split("|")[2:-2]]
    rows = [row.split("|") for row in readme.splitlines() if row.startswith("|")]
    shown_there = {row[1].strip(" *"): row[2:-2] for row in rows if row[1].strip(" *") in columns}
    assert len(networks) >= 3 and len(shown_there) >= 3
    for name, cells in shown_there.items():
        page_has = [lines[network][columns[name] + 1].strip(" ") for network in networks]
        to = f"{UNBROKEN}to{UNBROKEN}"
        assert [cell.strip(" ").replace("\N{NON-BREAKING HYPHEN}", to) for cell in cells] == page_has, name


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_page_and_the_picture_are_what_their_command_writes(tmp_path: Path) -> None:
    (words,) = commands(PAGE.read_text().partition("\n## ")[0])
    for file in ("docs/plan.html", "docs/images/does-it-help.svg"):
        written = tmp_path / Path(file).name
        assert cli.main([str(written) if word == "$FILE" else word for word in words]) == 0
        assert written.read_text() == (ROOT / file).read_text(), f"write {file} anew with the command of {PAGE.name}"


if __name__ == "__main__":
    print(*table_of_networks(), "", *table_of_networks(IN_INT4), "", *table_of_levels(), sep="\n")
