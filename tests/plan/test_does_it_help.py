"""docs/does-it-help.md shows what its commands print, and its page and picture are those that they write.

`python -m tests.plan.test_does_it_help` writes the table by network anew, and README's, which shows cells of it.
"""

import argparse
import csv
import io
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from string import Template

import pytest

from optimus_cc_ext.config.classes import TrafficClass
from optimus_cc_ext.config.trials import LEAST_GAIN
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.tools import cli
from optimus_cc_ext.tools.plan.answer import ADMITTED
from optimus_cc_ext.tools.plan.command import add_arguments, asked_of
from optimus_cc_ext.tools.plan.hardware import network_of
from optimus_cc_ext.tools.plan.iteration import iteration
from optimus_cc_ext.tools.plan.variants import Band, Sweep, config_in
from scripts.planned import __main__ as planned
from scripts.planned.grid import NETWORKS

ROOT = Path(__file__).resolve().parents[2]
PAGE, README = ROOT / "docs" / "does-it-help.md", ROOT / "README.md"
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


BALANCED, DIRECT, BOTH, NO_COMPRESSION = (
    ["--optimus-cc", "balanced"], ["--expert-exchange", "direct"], ["--expert-dispatch-format", "int8"], list[str]()
)  # fmt: skip
HYBRID = ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep"]
WAYS = {
    "`alltoall`": NO_COMPRESSION,
    "with `balanced`": BALANCED,
    "also `--expert-dispatch-format int8`": [*BALANCED, *BOTH],
    "`balanced` with `--expert-exchange direct`": [*BALANCED, *DIRECT],
    "HybridEP, with RDMA": HYBRID,
}
"""Flags of each row of the table of a mixture over nodes, by the row's first cell."""


def over_nodes(link: str, nodes: int, flags: list[str]) -> float:
    """Return the planned seconds of Qwen3 30B with its experts over all nodes."""
    (*_, words) = commands(section(BY_NETWORK))
    here, ranks = words[: words.index("--optimus-cc")], str(8 * nodes)
    changed = {"--sweep": f"link={link}", "--nodes": str(nodes), "--expert-model-parallel-size": ranks}
    changed |= {"--global-batch-size": str(64 * nodes)}
    for flag, value in changed.items():
        here[here.index(flag) + 1] = value
    (row,) = printed([*here, *flags])
    return float(row["vanilla s"]) * (1 - float(row.get("yours: gain %", 0)) / 100)


def table_over_nodes() -> list[str]:
    """Return the rows of the table of a mixture over nodes."""
    rows, plain = [], {nodes: over_nodes("100gbe", nodes, []) for nodes in (4, 8)}
    for way, flags in WAYS.items():
        taken = {nodes: over_nodes("100gbe", nodes, flags) for nodes in plain}
        faster = (f"{plain[nodes] / taken[nodes]:.1f}" if flags else "1" for nodes in plain)
        rows.append(f"| {way} | {taken[4]:.0f} | {' | '.join(faster)} |")
    return rows


def test_the_figures_of_a_mixture_over_nodes_are_planned_on_4_nodes_and_on_8() -> None:
    rows = table_over_nodes()
    assert "\n".join(rows) in section(OVER_NODES), "\n".join(rows)


def test_where_rdma_runs_the_page_names_the_faster_of_once_a_node_and_hybridep() -> None:
    for link, ours in (("roce100x1", True), ("hdr1", True), ("ndr1", True), ("ndr8", False)):
        once, vanilla = (over_nodes(link, 4, flags) for flags in (BALANCED, []))
        assert (once < vanilla) is ours, f"{link}: {once} s once a node, {vanilla} s with vanilla's best dispatcher"


@pytest.mark.ci
@pytest.mark.parametrize("column", range(6))
def test_balanced_saves_what_the_best_of_its_classes_save_or_nothing_where_its_trial_goes_dense(column: int) -> None:
    words = list(commands(section(BY_NETWORK)))[column]
    place = words.index("--sweep")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    asked = asked_of(parser.parse_args([*words[1:place], *words[place + 2 :]]))
    job, allowed = asked.job, list[TrafficClass]()
    for traffic in ADMITTED:
        with suppress(FlagError):
            config_in([traffic.format_flag, ADMITTED[traffic]], job)
            allowed.append(traffic)
    for network in Sweep.parsed(words[place + 1]).links:
        cluster = replace(asked.cluster, network=network_of(network))
        vanilla = iteration(cluster, job).seconds
        saved = [
            100 * (1 - iteration(cluster, job, config_in(flags, job)).seconds / vanilla)
            for number in range(1, len(allowed) + 1)
            for classes in combinations(allowed, number)
            for flags in [[word for each in classes for word in (each.format_flag, ADMITTED[each])]]
        ]
        balanced = 100 * (1 - Band(cluster, job).seconds(config_in(["--optimus-cc", "balanced"], job))[0] / vanilla)
        if max(saved) < 100 * LEAST_GAIN:
            assert balanced == 0.0, network
        elif max(saved) - 0.2 >= 100 * LEAST_GAIN:
            assert balanced >= max(saved) - 0.2, network


IN_README = {"GPT 8.3B": 1, "Llama 3 8B": 2, "Qwen3 30B": 4}
"""Columns of README's table, with their places in the table by network."""

NETWORKS_IN_README = ("25 GbE", "100 GbE", "1 x 200G", "1 x 400G", "8 x 400G")


def table_of_readme(by_network: list[str]) -> list[str]:
    """Return the rows of README's table: some networks and models, with a verdict."""
    cells_of = {network: cells for network, *cells in rows_of("\n".join(by_network))}
    rows = []
    for network in NETWORKS_IN_README:
        cells = [cells_of[network][place] for place in IN_README.values()]
        gains = [int(cell.partition(UNBROKEN)[0]) for cell in cells]
        verdict = "yes" if min(gains) >= 10 else "maybe" if max(gains) > 1 else "no"
        short = (cell.replace(f"{UNBROKEN}to{UNBROKEN}", "\N{NON-BREAKING HYPHEN}") for cell in cells)
        rows.append(f"| {network} | {verdict} | {' | '.join(short).replace(UNBROKEN, ' ')} |")
    return rows


def test_the_readme_shows_cells_of_the_page() -> None:
    readme = README.read_text()
    by_network = [line for line in section(BY_NETWORK).splitlines() if line.startswith("|")]
    assert f"| {' | '.join(IN_README)} |" in readme and "\n".join(table_of_readme(by_network[2:])) in readme
    said = " ".join(readme.split())
    ours, hybrid = re.findall(r"span nodes, it saves (\d+) % on 100 GbE; HybridEP, .*, (\d+) %\.", said)[0]
    (row,) = (cells for cells in rows_of(section(BY_NETWORK)) if cells[0] == "100 GbE")
    assert row[6].startswith(f"{ours}{UNBROKEN}")
    plain, *_, flex = (float(cells[1]) for cells in rows_of(section(OVER_NODES)) if cells[1].isdecimal())
    assert abs(100 * (1 - flex / plain) - int(hybrid)) < 1


def write(path: Path, rows: list[str]) -> None:
    """Replace the rows of a page's table that have the first cells, and as many, as these."""
    text = path.read_text()
    for row in rows:
        name, cells = re.escape(row.split("|")[1]), row.count("|") - 2
        text, number = re.subn(rf"^\|{name}(\|[^|\n]*){{{cells}}}\|$", row, text, flags=re.MULTILINE)
        assert number == 1, f"{path.name} has {number} rows of{row.split('|')[1]}"
    path.write_text(text)


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
    by_network = table_of_networks()
    write(PAGE, [*by_network, *table_over_nodes()])
    write(README, table_of_readme(by_network))
