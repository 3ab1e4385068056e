"""The page of a planned grid, opened in Chromium, shows what `optimus-cc plan` prints."""

import json
import random
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from optimus_cc_ext.tools.plan.variants import Gain
from scripts.planned.grid import Cell, PlanGrid
from scripts.planned.grid_files import write_grid
from tests.plan.test_grid import numbers_of, planned

LINKED = Path(__file__).resolve().parents[2] / "docs" / "plan.html"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
    pytest.mark.skipif(BROWSER is None, reason="the page's script needs a browser: install chromium"),
]

DRIVER = """<pre id="seen"></pre><script>{
const text = selector => document.querySelector(selector).textContent;
const seen = CLICKS.map(selectors => {
  for (const selector of selectors) document.querySelector(selector).click();
  return {
    where: text("#where"), gain: text("#gain"), meaning: text("#meaning"),
    command: document.querySelector("#command").hidden ? "" : text("#command"),
    map: [...document.querySelectorAll("#map tr")].slice(1).map(
      row => [...row.cells].slice(1).map(cell => cell.textContent)),
    bars: [...document.querySelectorAll("#bars svg > text:not([text-anchor])")].map(label => label.textContent),
    checked: [...document.querySelectorAll("input:checked")].map(input => input.value).join("|"),
  };
});
document.querySelector("#seen").textContent = JSON.stringify(seen);
}</script>
"""


def seen_after(page: Path, clicks: list[list[str]], folder: Path) -> list[dict[str, Any]]:
    """Click on elements of a copy of `page`; return its texts after each list of selectors in `clicks`."""
    copy = folder / "driven.html"
    copy.write_text(page.read_text().replace("</body>", DRIVER.replace("CLICKS", json.dumps(clicks)) + "</body>"))
    words = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    ran = subprocess.run(
        [*words, "--dump-dom", copy.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )  # fmt: skip
    found = re.search(r'<pre id="seen">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert found and found[1], ran.stderr[-2000:]
    seen: list[dict[str, Any]] = json.loads(unescape(found[1]))
    return seen


def radio(name: str, value: str) -> str:
    return f'input[name="{name}"][value="{value}"]'


def number(text: str) -> float:
    return float(text.replace("\N{MINUS SIGN}", "-"))


# The page shows one digit of numbers that `plan` prints with two.
ROUNDING = 0.0501

MEANING = re.compile(r"Between (\S+) and (\S+) %: it .*\. Vanilla takes (\S+) s per iteration, (.+?) (\S+) s\. .*")


def test_chosen_points_of_the_linked_page_show_what_their_command_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = numbers_of(LINKED)
    keys = random.Random(43).sample(sorted(numbers["points"]), 4)
    clicks = [[radio(*pair) for pair in zip(numbers["axes"], key.split("|"), strict=True)] for key in keys]
    # The last point keeps batch and format, and is chosen in the map.
    keys.append("|".join(("10gbe", "8", *keys[-1].split("|")[2:])))
    clicks.append(['td[data-network="10gbe"][data-replicas="8"]'])
    for key, seen in zip(keys, seen_after(LINKED, clicks, tmp_path), strict=True):
        assert seen["checked"] == key
        vanilla, gain, least, most = planned(seen["command"], capsys)
        said = MEANING.fullmatch(seen["meaning"])
        assert said and said[4] == key.split("|")[-1], seen["meaning"]
        more = " % more time" if gain <= -0.05 else " % less time"
        shown = [number(text) for text in (seen["gain"].removesuffix(more), said[1], said[2])]
        assert shown == pytest.approx([abs(gain), least, most], abs=ROUNDING), seen["command"]
        assert number(said[3]) == pytest.approx(vanilla, rel=1e-4)
        assert number(said[5]) == pytest.approx(vanilla * (1 - gain / 100), rel=2e-4)


def test_map_and_bars_show_the_points_of_all_networks_with_the_chosen_batch_and_format(tmp_path: Path) -> None:
    numbers = numbers_of(LINKED)
    lines, replicas = numbers["axes"]["network"], numbers["axes"]["replicas"]
    (seen,) = seen_after(
        LINKED, [[radio("batch", "64"), radio("format", "DP gradients int4"), radio("replicas", "2")]], tmp_path
    )
    gains = [[numbers["points"][f"{line}|{count}|64|DP gradients int4"][2] for line in lines] for count in replicas]
    assert [[number(cell) for cell in row] for row in seen["map"]] == [
        pytest.approx(row, abs=ROUNDING) for row in gains
    ]
    assert seen["bars"][::2] == list(lines.values())
    assert [number(label) for label in seen["bars"][1::2]] == pytest.approx(gains[replicas.index(2)], abs=ROUNDING)


def test_a_loss_and_a_point_without_a_plan_are_shown_as_such(tmp_path: Path) -> None:
    cells = (
        Cell("hdr1", 1, 64, "int8", "--tensor-model-parallel-size 8", "--lossy", 2.0, Gain(-0.123, -0.2, -0.05)),
        Cell("ndr1", 1, 64, "int8", reason="it does <not> fit"),
    )
    lines = {"hdr1": "1 x 200G", "ndr1": "1 x 400G"}
    grid = PlanGrid("a job", "optimus-cc plan", lines, (1,), (64,), ("int8",), ("hdr1", 1, 64, "int8"), cells)
    write_grid(tmp_path / "grid.html", grid)
    lost, unknown = seen_after(tmp_path / "grid.html", [[], [radio("network", "ndr1")]], tmp_path)
    assert lost["gain"] == "12.3 % more time"
    assert lost["meaning"].startswith(
        "Between \N{MINUS SIGN}20.0 and \N{MINUS SIGN}5.0 %: it does not pay. Vanilla takes 2 s"
    )
    assert lost["command"] == "optimus-cc plan --sweep link=hdr1 -- --tensor-model-parallel-size 8 --lossy"
    assert (unknown["gain"], unknown["meaning"], unknown["command"]) == ("not planned", "it does <not> fit", "")
    assert unknown["map"] == [["\N{MINUS SIGN}12.3", "-"]]
    assert unknown["bars"] == ["1 x 200G", "\N{MINUS SIGN}12.3", "1 x 400G", "not planned"]
