"""The page of a planned grid, opened in Chromium, shows what `optimus-cc plan` prints."""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optimus_cc_ext.tools.plan.variants import Gain
from scripts.planned.grid import Cell, PlanGrid
from scripts.planned.grid_files import write_grids
from tests.browser import Page, browser, needs_browser
from tests.plan.test_grid import numbers_of, planned, points_of

LINKED = Path(__file__).resolve().parents[2] / "docs" / "plan.html"

pytestmark = [pytest.mark.full, pytest.mark.timeout(300), needs_browser]

SEEN = """(() => {
const text = selector => document.querySelector(selector).textContent;
const texts = selector => [...document.querySelectorAll(selector)].map(each => each.textContent);
return {
  where: text("#where"), gain: text("#gain"), meaning: text("#meaning"), command: text("#command"),
  hidden: document.querySelector("#repeat").hidden, map: texts("#map button"), bars: texts("#bars .count"),
  words: texts("#bars li > span:last-child"),
  lines: texts("#bars li > :first-child"), link: document.querySelector("#link").href, address: location.href,
  checked: [...document.querySelectorAll("input:checked")].map(input => input.value).join("|"),
};
})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


def choose(page: Page, **chosen: str) -> dict[str, Any]:
    """Click on the inputs with these names and values; return what the page shows then."""
    for name, value in chosen.items():
        page.run(f"""document.querySelector('input[name="{name}"][value="{value}"]').click()""")
    return dict(page.run(SEEN))


def number(text: str) -> float:
    return float(text.replace("\N{MINUS SIGN}", "-").replace(",", ""))


# The page shows one digit of numbers that `plan` prints with two.
ROUNDING = 0.0501
MEANING = re.compile(r"Between (\S+) and (\S+) % less time\. Vanilla takes (\S+) s an iteration, this (\S+) s\..*")


def test_chosen_points_of_the_linked_page_show_what_their_command_prints(
    page: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    grids = numbers_of(LINKED)
    assert [grid["model"] for grid in grids] == ["llama3-8b", "llama3-70b", "qwen3-30b"]
    page.open(LINKED)
    chance = random.Random(43)
    for grid in grids:
        for key, point in chance.sample([(k, p) for k, p in points_of(grid).items() if not isinstance(p, str)], 2):
            seen = choose(page, model=grid["model"], **dict(zip(grid["axes"], key.split("|"), strict=True)))
            assert seen["checked"] == f"{grid['model']}|{key}"
            vanilla, gain, least, most = planned(seen["command"], capsys)
            said = MEANING.fullmatch(seen["meaning"])
            assert said, seen["meaning"]
            assert seen["gain"].lower().startswith(f"{point[4]}: ")
            if abs(gain) >= 0.1:
                amount, *_ = seen["gain"].partition(": ")[2].split(" ")
                assert number(amount) == pytest.approx(abs(gain), abs=ROUNDING)
                assert ("more time" in seen["gain"]) is (gain < 0)
            assert [number(text) for text in said.groups()[:2]] == pytest.approx([least, most], abs=ROUNDING)
            assert number(said[3]) == pytest.approx(vanilla, rel=6e-3)
            assert number(said[4]) == pytest.approx(vanilla * (1 - gain / 100), rel=6e-3)


def test_map_and_bars_show_the_points_of_all_networks_with_the_chosen_batch_and_format(page: Page) -> None:
    grid = numbers_of(LINKED)[0]
    lines, replicas, points = grid["axes"]["net"], [*grid["axes"]["replicas"]], points_of(grid)
    page.open(LINKED)
    seen = choose(page, batch="64", format="DP gradients int4", replicas="2")
    found = [[points[f"{line}|{count}|64|DP gradients int4"] for count in replicas] for line in lines]
    shown = [label.split(" ") for label in seen["map"]]
    expected = [point for row in found for point in row]
    assert [word for word, _ in shown] == [point[4] for point in expected]
    assert [number(gain) for _, gain in shown] == pytest.approx([point[1] for point in expected], abs=ROUNDING)
    mine = [row[replicas.index("2")] for row in found]
    assert seen["lines"] == list(lines.values()) and seen["words"] == [point[4] for point in mine]
    bars = [
        [number(text) for text in bar.replace("(", "").replace(")", "").split(" ") if text != "to"]
        for bar in seen["bars"]
    ]
    assert bars == [pytest.approx(point[1:4], abs=ROUNDING) for point in mine]


def test_the_page_opens_where_there_is_something_to_decide_and_a_link_keeps_the_choice(page: Page) -> None:
    page.open(LINKED)
    first = page.run(SEEN)
    assert first["gain"].startswith("Yes: ") and "100 GbE" in first["where"]
    chosen = choose(page, model="qwen3-30b", net="ndr8", format="paper")
    fragment = chosen["link"].partition("#")[2]
    assert fragment == "model=qwen3-30b&net=ndr8&replicas=8&batch=256&format=paper"
    page.open(LINKED, fragment="#" + fragment)
    assert page.run(SEEN) == chosen
    # A link may name only a part of the choice, or what there is not.
    page.open(LINKED, fragment="#net=25gbe&replicas=5&model=gpt9&colour=red")
    partly = page.run(SEEN)
    assert partly["checked"] == "llama3-8b|25gbe|4|256|balanced" and "25 GbE" in partly["where"]
    page.run("location.hash = '#net=10gbe'")
    assert "10 GbE" in page.run("new Promise(done => setTimeout(() => done(document.title), 50)) && " + SEEN)["where"]


def test_a_loss_and_a_point_without_a_plan_are_shown_as_such(page: Page, tmp_path: Path) -> None:
    cells = (
        Cell("hdr1", 1, 64, "int8", "--tensor-model-parallel-size 8", "--lossy", 2.0, Gain(-0.123, -0.2, -0.05)),
        Cell("ndr1", 1, 64, "int8", reason="it does <not> fit"),
    )
    lines = {"hdr1": "1 x 200G", "ndr1": "1 x 400G"}
    start = ("hdr1", 1, 64, "int8")
    grid = PlanGrid("a job", "A job", "optimus-cc plan", lines, (1,), (64,), ("int8",), start, cells)
    write_grids(tmp_path / "grid.html", [grid])
    page.open(tmp_path / "grid.html")
    lost, unknown = page.run(SEEN), choose(page, net="ndr1")
    assert lost["gain"] == "No: 12.3 % more time"
    assert lost["meaning"].startswith("Between \N{MINUS SIGN}20.0 and \N{MINUS SIGN}5.0 % less time. Vanilla takes 2 s")
    assert lost["command"] == "optimus-cc plan --sweep link=hdr1 -- --tensor-model-parallel-size 8 --lossy"
    assert (unknown["gain"], unknown["meaning"], unknown["hidden"]) == ("Not planned", "it does <not> fit.", True)
    assert unknown["map"] == ["no \N{MINUS SIGN}12.3", "-"] and unknown["bars"][1] == "not planned"
