"""Pages in Chromium, on a phone and on a desk, in light and in the dark, can be read, and used by keyboard alone."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from optimus_cc_ext.tools import cli
from scripts.paper.collect import collect
from scripts.planned import __main__ as planned
from tests.browser import SCHEMES, WIDTHS, Page, browser, needs_browser
from tests.scripts.test_paper_results import LOG
from tests.unit.test_quickstart import outcome_of
from tests.unit.test_report_command import write_run

ROOT = Path(__file__).resolve().parents[2]
CONTRAST = 4.5
"""Least contrast of text with its background, by WCAG 2.1, level AA."""

pytestmark = [pytest.mark.full, pytest.mark.timeout(300), needs_browser]

AUDIT = """(() => {
const found = [], canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const name = each => each.tagName + (each.id && "#" + each.id) + " " + each.textContent.trim().slice(0, 30);
const visible = each => each.checkVisibility({ visibilityProperty: true }) && !each.closest("thead") &&
  !["SCRIPT", "STYLE", "TITLE", "DESC", "TEMPLATE"].includes(each.tagName.toUpperCase());
const style = each => getComputedStyle(each);
const painted = colours => {
  colours.forEach(colour => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); });
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const luminance = ([...rgb]) => rgb.slice(0, 3).map(each => each / 255).map(each => each <= .03928 ? each / 12.92 :
  ((each + .055) / 1.055) ** 2.4).reduce((sum, each, place) => sum + each * [.2126, .7152, .0722][place], 0);
const behind = each => {
  const colours = ["white"];
  for (let at = each; at; at = at.parentElement) colours.splice(1, 0, style(at).backgroundColor);
  const paper = each.closest("svg")?.querySelector("#patch_1 path");
  return paper ? [...colours, style(paper).fill] : colours;
};
const all = [...document.querySelectorAll("body *")].filter(visible);
for (const each of all) {
  if (![...each.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())) continue;
  const ground = behind(each), ink = each.closest("svg") ? style(each).fill : style(each).color;
  const [one, two] = [luminance(painted(ground)), luminance(painted([...ground, ink]))];
  const contrast = (Math.max(one, two) + .05) / (Math.min(one, two) + .05);
  if (contrast < CONTRAST) found.push("contrast " + contrast.toFixed(2) + ": " + name(each));
  const size = parseFloat(style(each).fontSize) * (each.closest("svg") ? each.closest("svg").getScreenCTM().a : 1);
  const small = size < 6.5 && (innerWidth >= 480 || !each.closest("svg"));
  if (small) found.push("letters of " + size.toFixed(1) + " px: " + name(each));
}
const root = document.scrollingElement;
if (root.scrollWidth > innerWidth) found.push("the page is wider than the screen: " + root.scrollWidth);
for (const each of all) {
  const box = each.getBoundingClientRect(), inside = each.closest("svg");
  if (inside && inside !== each) continue;
  if (box.width && (box.right > innerWidth + 1 || box.left < -1)) found.push("cut at the screen's edge: " + name(each));
  if (!inside && each.scrollWidth > each.clientWidth + 2 && style(each).display !== "inline" &&
    !["INPUT", "CANVAS"].includes(each.tagName)) found.push("wider than its box: " + name(each));
}
const own = "button, a[href], input, summary, select, textarea";
for (const each of document.querySelectorAll("*")) {
  const heard = Object.keys(getEventListeners(each)).filter(kind => /click|mouse|pointer|key|touch/.test(kind));
  if ((heard.length || each.onclick) && !each.matches(own)) found.push("a handler without a button: " + name(each));
  if (each.tabIndex > 0) found.push("an order of its own: " + name(each));
}
for (const each of document.querySelectorAll("svg")) {
  if (each.getAttribute("role") !== "img") found.push("a picture without its role");
  for (const kind of ["title", "desc"]) if (!each.querySelector(":scope > " + kind)?.textContent.trim())
    found.push("a picture without " + kind);
  const labels = (each.getAttribute("aria-labelledby") || "none").split(" ").map(id => document.getElementById(id));
  if (labels.some(label => !each.contains(label))) found.push("a picture whose label is elsewhere");
}
for (const each of document.querySelectorAll("img")) if (!/\\d/.test(each.alt)) found.push("alt without a number");
if (document.querySelector("button, input") && !document.querySelector("[aria-live]")) found.push("no aria-live");
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
if (dark === luminance(painted([style(document.body).backgroundColor])) > .5) found.push("the wrong scheme");
return found;
})()""".replace("CONTRAST", str(CONTRAST))

FOCUSED = """(() => {
const at = document.activeElement, shown = at.matches("input") ? at.closest("label") : at;
return at === document.body ? "" : JSON.stringify([at.tagName, at.name || at.id ||
  (at.dataset.net || "") + at.dataset.replicas || at.textContent, getComputedStyle(shown).outlineStyle !== "none"]);
})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


def plan(_folder: Path) -> Path:
    return ROOT / "docs" / "plan.html"


def quickstart(folder: Path) -> Path:
    outcome_of().write(folder)
    return folder / "index.html"


def alarm(folder: Path) -> Path:
    outcome_of(raw_bytes=2.0).write(folder)
    return folder / "index.html"


def two_runs(folder: Path) -> Path:
    write_run(folder / "a" / "tensorboard")
    write_run(folder / "b" / "tensorboard", loss=9.0)
    assert cli.main(["report", str(folder / "a"), str(folder / "b"), "--output", str(folder / "out")]) == 0
    return folder / "out" / "index.html"


def vanilla(folder: Path) -> Path:
    write_run(folder / "plain", ours=False)
    assert cli.main(["report", str(folder / "plain"), "--output", str(folder / "out")]) == 0
    return folder / "out" / "index.html"


def long_names(folder: Path) -> Path:
    """Make a report of two runs whose folders have names without a place to break."""
    runs = [folder / f"llama3_8b_tp2_pp4_dp8_seed_1234_of_the_second_campaign_{name}" for name in ("dense", "balanced")]
    for run in runs:
        write_run(run / "tensorboard")
    assert cli.main(["report", *map(str, runs), "--output", str(folder / "out")]) == 0
    return folder / "out" / "index.html"


def paper(folder: Path) -> Path:
    """Make the report of the paper's experiments."""
    for experiment in ("figure10", "figure11", "figure12"):
        for variant, ms, mb in (("baseline", "300.0", "200.00"), ("cb-lep", "200.0", "250.00")):
            run = folder / experiment / f"8.3b-{variant}"
            run.mkdir(parents=True)
            (run / "log.txt").write_text(LOG.replace("{ms}", ms).replace("{mb}", mb))
    collect(folder, folder / "out")
    return folder / "out" / "index.html"


def whole_plan(folder: Path) -> Path:
    words = ["--cluster", "h100-100gbe", "--nodes", "8", "--model", "llama3-8b", "--output", str(folder / "out")]
    flags = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4"]
    assert planned.main([*words, "--", *flags]) == 0
    return folder / "out" / "index.html"


@pytest.mark.parametrize("make", [plan, quickstart, alarm, two_runs, vanilla, long_names, paper, whole_plan])
def test_a_page_can_be_read_on_a_phone_and_on_a_desk_in_light_and_in_the_dark(
    page: Page, make: Callable[[Path], Path], tmp_path: Path
) -> None:
    # A desk's screen at 400 % has 320 pixels, where only pictures may be too small, which a reader enlarges alone.
    file, found = make(tmp_path), {}
    for width in (320, *WIDTHS):
        for scheme in SCHEMES:
            page.open(file, width, scheme)
            found[width, scheme] = page.run(AUDIT)
    assert found == {screen: [] for screen in found}, found


def tabbed(page: Page) -> list[str]:
    """Press Tab until the focus leaves the page; return what had it, in order."""
    seen: list[str] = []
    while True:
        page.press("Tab")
        focused = page.run(FOCUSED)
        if not focused or focused in seen:
            return seen
        seen.append(focused)
        assert focused.endswith("true]"), f"the focus is not shown: {focused}"


@pytest.mark.parametrize("width", WIDTHS)
def test_the_planners_page_is_used_by_keyboard_alone(page: Page, width: int) -> None:
    page.open(ROOT / "docs" / "plan.html", width)
    controls = page.run("document.querySelectorAll('fieldset, button, a[href]').length")
    assert len(tabbed(page)) == controls > 30
    # The arrows choose another network, Enter copies the command, and the space bar chooses a cell and stays there.
    page.open(ROOT / "docs" / "plan.html", width)
    where = "document.querySelector('#where').textContent"
    page.press("Tab")
    page.press("Tab")
    page.press("ArrowRight")
    assert "line of a node: 1 x 200G" in page.run(where)
    while page.run("document.activeElement.id") != "copy":
        page.press("Tab")
    page.press("Enter")
    assert page.run("document.activeElement.textContent") == "Copied"
    while page.run("document.activeElement.dataset.net") != "25gbe":
        page.press("Tab")
    page.press(" ")
    assert "25 GbE, replicas on a node: 1" in page.run(where)
    assert page.run("document.activeElement.dataset.net") == "25gbe", "the focus is lost by the choice"
    assert page.run("document.activeElement.getAttribute('aria-pressed')") == "true"


def test_the_long_texts_of_a_page_unfold_by_keyboard(page: Page, tmp_path: Path) -> None:
    page.open(quickstart(tmp_path))
    assert len(tabbed(page)) == page.run("document.querySelectorAll('summary, button, a[href]').length") > 0
    page.open(tmp_path / "index.html")
    page.press("Tab")
    page.press("Enter")
    assert page.run("document.querySelector('details').open")


def test_a_browser_without_scripts_says_what_prints_the_same_numbers(page: Page) -> None:
    page.open(ROOT / "docs" / "plan.html", script=False)
    assert "optimus-cc plan" in page.run("document.querySelector('noscript').innerText")


def test_a_copy_that_the_browser_forbids_is_not_called_done(page: Page) -> None:
    page.open(ROOT / "docs" / "plan.html")
    page.run("document.execCommand = () => false")
    page.run("document.querySelector('#copy').click()")
    assert page.run("document.querySelector('#copy').textContent") == "Selected: copy it by your keyboard"
    assert page.run("String(getSelection())") == page.run("document.querySelector('#command').textContent")


def test_the_choice_and_the_bars_are_seen_in_the_colours_of_high_contrast(page: Page, tmp_path: Path) -> None:
    page.open(ROOT / "docs" / "plan.html", forced="active")
    colour = "getComputedStyle(document.querySelector('{}')).backgroundColor"
    label = "fieldset label:has(input{})"
    assert page.run(colour.format(label.format(":checked"))) != page.run(colour.format(label.format(":not(:checked)")))
    shown = [page.run(colour.format(each)) for each in ("#bars .dot", "#bars .track", "#bars .track span")]
    assert shown[0] != shown[1] != shown[2]
    page.open(quickstart(tmp_path), forced="active")
    assert page.run(colour.format(".bar")) != page.run(colour.format("td:has(.bar)"))
