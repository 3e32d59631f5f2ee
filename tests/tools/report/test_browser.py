"""The page in a browser: opened from disk, pointed at, zoomed, sorted, in both themes and on a phone."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tools.lab.lab_process import until
from tools.report.demos import demo_document
from tools.report.run_files import run_folder, scaling_document, written_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here: apt-get install chromium")

HOSTILE = (
    "</script><script>window.owned=1</script><img src=x onerror=window.owned=1>"
    '<b>bold</b><a href="javascript:window.owned=1">link</a>&lt;i&gt;'
)
BRIGHTNESS = """colour => {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = colour;
  return getComputedStyle(probe).color.match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0);
}"""


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with playwright.sync_playwright() as driver:
        # Chromium's own sandbox cannot be set up by root, as whom containers run.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        started = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield started
        started.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    written_page(run_folder(folder / "run"), folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    written_page(run_folder(folder / "run", HOSTILE), folder / "report.html")
    return folder / "report.html"


@dataclass
class Opened:
    """A page, and what it asked for and complained of since it was opened."""

    page: "Page"
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


class Opener:
    """Opens pages, and closes them when a test is over."""

    def __init__(self, browser: "Browser") -> None:
        self._browser = browser
        self._pages: list[Page] = []

    def __call__(self, path: Path, **context: Any) -> Opened:
        page = self._browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **context})
        self._pages.append(page)
        found = Opened(page)
        page.on("request", lambda request: found.requests.append(request.url))
        page.on("console", lambda message: found.complaints.append(message.text))
        page.on("pageerror", lambda error: found.complaints.append(str(error)))
        page.goto(path.as_uri())
        if context.get("java_script_enabled", True):
            page.wait_for_selector("html[data-ready=yes]", timeout=60_000)
        return found

    def close(self) -> None:
        for page in self._pages:
            page.close()


@pytest.fixture
def opened(browser: "Browser") -> Iterator[Opener]:
    opener = Opener(browser)
    yield opener
    opener.close()


def width(page: "Page", key: str) -> float:
    """Of what a chart shows of its axis."""
    low, high = page.evaluate(f"document.querySelector('#{key} .plot').layout.xaxis.range")
    return float(high - low)


def point_at(page: "Page", series: str) -> str:
    """Point at the longest bar of a series in the plan's picture, and read what appears."""
    at = page.evaluate("""name => {
      const plot = document.querySelector("#plan-0 .plot");
      plot.scrollIntoView({ block: "center", behavior: "instant" });
      const order = plot.data.filter(series => series.type === "bar").findIndex(series => series.name === name);
      const bars = [...plot.querySelectorAll(".barlayer .trace.bars")[order].querySelectorAll(".point path")];
      const boxes = bars.map(bar => bar.getBoundingClientRect());
      const longest = boxes.reduce((best, box) => (box.width > best.width ? box : best));
      return [longest.x + longest.width / 2, longest.y + longest.height / 2];
    }""", series)  # fmt: skip
    page.mouse.move(at[0] - 2, at[1])
    page.mouse.move(*at)
    label = page.locator("#plan-0 .hoverlayer .hovertext").first
    label.wait_for(timeout=60_000)
    return label.text_content() or ""


def test_it_opens_from_disk_and_asks_for_nothing(opened: Opener, report: Path) -> None:
    found = opened(report, offline=True)
    assert found.requests == [report.as_uri()] and found.complaints == []
    charts = found.page.locator("figure.chart")
    assert charts.count() == 7 and found.page.locator(".plot .main-svg").count() >= charts.count()
    assert found.page.locator("#trouble").is_hidden()


@pytest.mark.parametrize("series", ["bucket fills", "communication, hidden", "communication, exposed"])
def test_pointing_at_a_bucket_shows_its_tensors(opened: Opener, report: Path, series: str) -> None:
    words = point_at(opened(report).page, series)
    assert "bucket" in words and "layer." in words and "tensor" in words


def test_zoom_by_dragging_by_buttons_and_by_keys(opened: Opener, report: Path) -> None:
    page = opened(report).page
    whole = width(page, "timelines")
    area = page.locator("#timelines .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 60, steps=5)
    page.mouse.up()
    page.wait_for_function(
        f"(([a, b]) => b - a < {0.6 * whole})(document.querySelector('#timelines .plot').layout.xaxis.range)"
    )
    page.locator("#timelines [data-tool=all]").click()
    assert width(page, "timelines") == pytest.approx(whole)
    page.locator("#timelines [data-tool=in]").click()
    assert width(page, "timelines") == pytest.approx(whole / 2)
    page.locator("#timelines .plot").focus()
    page.keyboard.press("-")
    page.keyboard.press("-")
    assert width(page, "timelines") == pytest.approx(2 * whole)
    page.keyboard.press("0")
    assert width(page, "timelines") == pytest.approx(whole)


def test_arrow_keys_lead_through_the_buckets(opened: Opener, report: Path) -> None:
    page = opened(report).page
    page.locator("#plan-0 .plot").focus()
    spoken = []
    for _ in range(2):
        page.keyboard.press("ArrowRight")
        spoken.append(page.locator("#plan-0 .spoken").text_content() or "")
    assert page.locator("#plan-0 .hoverlayer .hovertext").count() == 1
    assert "bucket 0" in spoken[0] and "layer.0" in spoken[0] and spoken[1] != spoken[0]


def test_arrow_keys_lead_along_a_curve_and_from_one_to_the_next(opened: Opener, report: Path) -> None:
    page = opened(report).page
    page.locator("#training .plot").focus()
    spoken = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp"):
        page.keyboard.press(key)
        spoken.append(page.locator("#training .spoken").text_content() or "")
    first, second, below, back = spoken
    assert len({first, second, below}) == 3 and back == second


def test_everything_can_be_reached_by_tab(opened: Opener, report: Path) -> None:
    page = opened(report).page
    page.evaluate("window.reached = new Set(); addEventListener('focusin', at => window.reached.add(at.target))")
    for _ in range(200):
        page.keyboard.press("Tab")
    missed = page.evaluate(
        "[...document.querySelectorAll('button, a[href], summary, .plot, .scroll, pre')]"
        ".filter(one => one.checkVisibility() && !window.reached.has(one)).map(one => one.outerHTML.slice(0, 80))"
    )
    assert missed == []


def test_the_table_sorts_both_ways(opened: Opener, report: Path) -> None:
    page = opened(report).page
    table = page.locator("#comparison table").first
    heads = table.locator("thead th")
    button = heads.filter(has_text="iteration").locator("button")

    def column() -> list[str]:
        return [text.split()[0] for text in table.locator("tbody th").all_inner_texts()]

    assert column() == ["per_tensor", "by_bytes", "layer", "single"]
    button.click()
    assert column() == ["layer", "by_bytes", "single", "per_tensor"]  # by number: 40, 50, 125, 300 ms
    button.press("Enter")
    assert column() == ["per_tensor", "single", "by_bytes", "layer"]
    assert heads.filter(has_text="iteration").get_attribute("aria-sort") == "descending"
    heads.first.locator("button").click()
    assert column() == ["by_bytes", "layer", "per_tensor", "single"]


def test_a_hostile_name_is_shown_and_does_not_run(opened: Opener, hostile: Path) -> None:
    found = opened(hostile)
    page = found.page
    assert "</script><script>" in point_at(page, "communication, exposed")  # its middle is left out there
    for details in page.locator("details").all():
        details.locator("summary").click()
    page.locator("#plan-0 .plot").focus()
    page.keyboard.press("ArrowRight")
    assert f"{HOSTILE}.0" in page.locator("#plan details").first.inner_text()
    assert "</script><script>" in (page.locator("#plan-0 .spoken").text_content() or "")
    assert page.evaluate("window.owned") is None
    assert page.locator("img").count() == 0 and page.locator("main a").count() == 0
    assert page.locator("script:not([type])").count() == 2  # ours, and plotly
    assert found.requests == [hostile.as_uri()] and found.complaints == []


def test_a_script_that_got_in_would_not_run(opened: Opener, report: Path, tmp_path: Path) -> None:
    planted = report.read_text().replace(
        "<main", "<script>window.owned=1</script><img src=x onerror=window.owned=1><main", 1
    )
    (tmp_path / "planted.html").write_text(planted)
    page = opened(tmp_path / "planted.html").page
    assert page.evaluate("window.owned") is None


@pytest.mark.parametrize("system", ["light", "dark"])
def test_themes(opened: Opener, report: Path, system: str) -> None:
    page = opened(report, color_scheme=system).page

    def brightness() -> list[float]:
        colours = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, document.querySelector('.plot').layout.paper_bgcolor]"
        )
        return [page.evaluate(BRIGHTNESS, colour) for colour in colours]

    dark = system == "dark"
    assert all((value < 200) == dark for value in brightness())
    page.locator("#theme").click()
    until(lambda: all((value < 200) != dark for value in brightness()))
    page.emulate_media(color_scheme="light" if dark else "dark")  # what the reader chose stays
    assert all((value < 200) != dark for value in brightness())


def test_a_zoom_survives_another_theme(opened: Opener, report: Path) -> None:
    page = opened(report).page
    page.locator("#plan-0 [data-tool=in]").click()
    before = width(page, "plan-0")
    paper = "document.querySelector('#plan-0 .plot').layout.paper_bgcolor"
    colour = page.evaluate(paper)
    page.locator("#theme").click()
    until(lambda: page.evaluate(paper) != colour)
    assert width(page, "plan-0") == pytest.approx(before)


def test_a_phone_shows_all_of_it(opened: Opener, report: Path) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
    page = opened(report, **phone).page
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    for plot in page.locator(".plot").all():
        box = plot.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390
    small = page.evaluate(
        "[...document.querySelectorAll('svg text')].filter(t => parseFloat(getComputedStyle(t).fontSize) < 9).length"
    )
    assert small == 0
    before = width(page, "plan-0")
    page.locator("#plan-0 [data-tool=in]").tap()
    assert width(page, "plan-0") == pytest.approx(before / 2)


def test_without_script_numbers_are_there(opened: Opener, report: Path) -> None:
    page = opened(report, java_script_enabled=False).page
    assert page.locator("table").count() >= 5 and page.locator(".tile").count() >= 6
    assert page.locator("noscript").count() == 1


@pytest.fixture(scope="module")
def demo_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    (folder / "demo.json").write_text(json.dumps(demo_document()))
    (folder / "scale.json").write_text(json.dumps(scaling_document()))
    written_page(folder, folder / "report.html")
    return folder / "report.html"


def test_a_phone_shows_all_of_a_demo(opened: Opener, demo_page: Path) -> None:
    page = opened(demo_page, viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True).page
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    outside = page.evaluate("""[...document.querySelectorAll(".textpoint text")].filter(text => {
      const plot = text.closest(".plot").getBoundingClientRect();
      return text.getBoundingClientRect().right > plot.right;
    }).length""")
    assert outside == 0


def test_the_page_of_a_demo_is_drawn_without_a_complaint(opened: Opener, demo_page: Path) -> None:
    found = opened(demo_page)
    assert found.complaints == [] and found.page.locator("figure.chart .main-svg").count() >= 6
    texts = found.page.locator("#demo-limit .textpoint text").all_text_contents()
    assert [text.strip() for text in texts].count("200 ms") == 2  # DDP, DataParallel
    box = found.page.locator(".headline").bounding_box()
    assert box is not None and box["y"] < 300  # seen without scrolling
