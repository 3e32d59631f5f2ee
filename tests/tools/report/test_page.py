"""The page of a report without a browser: what is in it, what is escaped, what is thinned, how large it gets."""

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from math import inf
from pathlib import Path
from typing import Any

import pytest

from anabranch.tools.cli.main import main
from anabranch.tools.report.chart import DASHES, PATTERNS, SYMBOLS, log_ticks, marker, name_lines, plotly_text
from anabranch.tools.report.formatting import size
from anabranch.tools.report.page import templates
from anabranch.tools.report.scaling import network_chart
from anabranch.tools.report.training import MAX_POINTS, downsample
from anabranch.values.curve import Curve
from anabranch.values.network import Network
from tools.report.run_files import metrics_line, run_folder, write_lines, written_page

HOSTILE = "</script><script>window.owned=1</script><img src=x onerror=window.owned=1><b>&lt;%{x}\"'\u202e\n"


ROUNDED = 1e-4


class Elements(HTMLParser):
    """Every element of a page with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def figures(page: str) -> list[dict[str, Any]]:
    """What the page's script draws."""
    return [
        json.loads(text) for text in re.findall(r'<script type="application/json" class="figure">(.*?)</script>', page)
    ]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page")
    return written_page(run_folder(folder / "run"), folder / "report.html")


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("hostile")
    return written_page(run_folder(folder / "run", HOSTILE), folder / "report.html")


def test_every_section_is_there(page: str) -> None:
    keys = [attributes.get("id") for tag, attributes in Elements(page).found if tag == "section"]
    assert keys == ["plan", "timelines", "training", "comparison", "scaling", "memory", "network", "files"]


def test_nothing_is_fetched(page: str) -> None:
    for tag, attributes in Elements(page).found:
        assert tag not in {"link", "iframe", "object", "embed", "img", "base"}
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")


def test_only_our_scripts_may_run(page: str) -> None:
    policy = next(a["content"] for tag, a in Elements(page).found if a.get("http-equiv") == "Content-Security-Policy")
    packed = re.search(r'<script type="text/plain" id="plotly">(.*?)</script>', page, re.S)
    ours = re.search(r"<script>(.*?)</script>", page, re.S)
    assert policy is not None and packed is not None and ours is not None
    plotly = gzip.decompress(base64.b64decode(packed[1]))
    assert b"plotly.js" in plotly[:100] and b"MIT" in plotly[:300]  # with its licence
    for script in (ours[1].encode(), plotly):
        assert base64.b64encode(hashlib.sha256(script).digest()).decode() in policy
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy


def test_a_hostile_name_adds_no_element(page: str, hostile_page: str) -> None:
    kinds = [tag for tag, _ in Elements(page).found]
    assert [tag for tag, _ in Elements(hostile_page).found] == kinds
    assert "<img" not in hostile_page and "window.owned=1</script>" not in hostile_page
    assert "\u202e" not in hostile_page


def test_names_of_files_and_titles_are_text(tmp_path: Path) -> None:
    name = "<img src=x onerror=owned>%{x}&lt;"
    for stem in ("a", name):
        write_lines(tmp_path / f"{stem}.jsonl", [metrics_line(step) for step in (1, 2)])
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html"), "--title", name]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<img" not in page and "&lt;img src=x onerror=owned&gt;%{x}&amp;lt;" in page
    series = [series for figure in figures(page) for series in figure["data"]]
    assert {one["hovertemplate"] for one in series} == {"%{customdata}<extra></extra>"}
    assert plotly_text(f"{name}.jsonl") in {one["name"] for one in series}


def test_plotly_is_given_no_tag_of_a_file(hostile_page: str) -> None:
    ours = re.compile(r"</?b>|<br>|<extra></extra>")

    def texts(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [text for item in value.values() for text in texts(item)]
        if isinstance(value, list):
            return [text for item in value for text in texts(item)]
        return [value] if isinstance(value, str) else []

    found = texts(figures(hostile_page))
    assert any("&lt;b&gt;" in text for text in found)
    assert not [text for text in found if "<" in ours.sub("", text) or ">" in ours.sub("", text)]


def test_no_template_has_words_of_a_file(hostile_page: str) -> None:
    for figure in figures(hostile_page):
        for series in figure["data"]:
            assert "owned" not in series.get("hovertemplate", "")


def test_series_differ_without_colour(page: str) -> None:
    by_key = {figure["key"]: figure["data"] for figure in figures(page)}
    lines = [series for series in by_key["scaling-0-0"] if series.get("hoverinfo") != "skip"]
    assert len({(series["line"]["dash"], series["marker"]["symbol"]) for series in lines}) == len(lines) == 2
    bars = [series["marker"]["pattern"]["shape"] for series in by_key["memory-0"] if series["type"] == "bar"]
    assert len(set(bars)) == len(bars) == 3
    plan = {series["name"]: series for series in by_key["plan-0"]}
    assert (
        plan["communication, exposed"]["marker"]["pattern"]["shape"]
        and not plan["communication, hidden"]["marker"]["pattern"]["shape"]
    )
    assert len(set(DASHES)) == len(set(PATTERNS)) == 8
    looks = [(marker(index)["color"], marker(index)["symbol"]) for index in range(len(SYMBOLS) * len(DASHES))]
    assert len(set(looks)) == len(looks)  # more strategies than there are colours differ all the same


def test_predicted_and_measured_share_an_axis(page: str) -> None:
    chart = next(figure for figure in figures(page) if figure["key"] == "timelines-chart")
    titles = [note["text"] for note in chart["layout"]["annotations"]]
    assert ["Predicted" in title for title in titles] == [True, False, False, False]  # and a timeline, and two ranks
    assert [name for name in chart["layout"] if name.startswith("xaxis")] == ["xaxis"]


def test_bands_are_drawn_where_costs_have_a_spread(page: str) -> None:
    chart = next(figure for figure in figures(page) if figure["key"] == "scaling-0-0")
    assert [series.get("fill") for series in chart["data"]] == ["toself", None, "toself", None]


def test_a_narrow_range_of_costs_has_several_ticks() -> None:
    network = Network(4, {"dense": Curve.through([(1 << 10, 0.004, 0.001), (1 << 20, 0.009, 0.001)])})
    ticks = network_chart("network-0", network).layout["yaxis"]["tickvals"]
    assert {5.0, 10.0} <= set(ticks)
    narrow = [tick for tick in log_ticks([100.0, 160.0])["tickvals"] if 100 <= tick <= 160]
    assert narrow == [100.0, 120.0, 150.0]
    assert log_ticks([0.002, 40.0])["ticktext"] == ["0.0001", "0.001", "0.01", "0.1", "1", "10", "100"]
    assert log_ticks([])["tickvals"] and log_ticks([0.0, inf])["tickvals"]


def test_the_best_planner_says_of_what(page: str) -> None:
    assert "DDP&#39;s default, predicted for " in page


def test_exposed_and_hidden_parts_add_up(page: str) -> None:
    chart = next(figure for figure in figures(page) if figure["key"] == "plan-0")
    bars = {series["name"]: series for series in chart["data"]}
    end = sum(bars["backward"]["x"])  # milliseconds, of which seven digits are written
    assert all(base >= end - ROUNDED for base in bars["communication, exposed"]["base"])
    assert all(
        base + length <= end + ROUNDED
        for base, length in zip(bars["communication, hidden"]["base"], bars["communication, hidden"]["x"], strict=True)
    )


# ------------------------------------------------------------------------------------------------------- words


def test_texts_are_spelled_out() -> None:
    page = templates()
    assert page.from_string("{{ text }}").render(text="<b>\"'&\x1b") == "&lt;b&gt;&#34;&#39;&amp;\\x1b"
    json_of = page.from_string("{{ value|tojson }}").render
    assert json_of(value=["</script><!--&\u2028"]) == '["\\u003c/script\\u003e\\u003c!--\\u0026\\u2028"]'
    assert json.loads(json_of(value=["</script>&"])) == ["</script>&"]
    assert plotly_text("<a href='x'>&lt;") == "&lt;a href='x'&gt;&amp;lt;"
    assert len(plotly_text("x" * 1000, 20)) == 20


def test_many_names_are_counted() -> None:
    assert name_lines(["a", "<b>"]) == ["a", "&lt;b&gt;"]
    assert name_lines([str(n) for n in range(20)])[-1] == "… and 6 more"


# ------------------------------------------------------------------------------------------------------ curves


def test_a_short_curve_is_kept_whole() -> None:
    points = [(n + 1, float(n)) for n in range(MAX_POINTS)]
    assert downsample(points) == points


@pytest.mark.parametrize("steps", [MAX_POINTS + 1, 10_000, 123_457])
def test_a_long_curve_loses_no_extreme(steps: int) -> None:
    values = [float(n * 7919 % 1000) for n in range(steps)]
    values[steps // 2], values[steps // 3] = 1e6, -1e6
    points = list(enumerate(values, start=1))
    found = downsample(points)
    assert len(found) <= MAX_POINTS and sorted(set(found)) == found and set(found) <= set(points)
    assert (steps // 2 + 1, 1e6) in found and (steps // 3 + 1, -1e6) in found


def test_a_long_run_of_a_large_model_stays_small(tmp_path: Path) -> None:
    page = written_page(run_folder(tmp_path / "run", steps=10_000, tensors=600), tmp_path / "report.html")
    assert len(page.encode()) < 5_000_000  # the target is 20 MB
    assert "the lowest and the highest value of every few" in page and "layer.599" in page
    chart = next(figure for figure in figures(page) if figure["key"] == "training-chart")
    words = [text for series in chart["data"] for text in series.get("customdata", ())]
    assert any("step 7: step time, ms 200" in text for text in words)


def test_predictions_that_never_hold_stay_small(tmp_path: Path) -> None:
    lines = [{**metrics_line(step), "predicted_s": 0.02 + step * 1e-6} for step in range(1, 3 * MAX_POINTS)]
    write_lines(tmp_path / "run.jsonl", lines)
    page = written_page(tmp_path, tmp_path / "report.html")
    drawn_curves = {curve["name"]: curve for figure in figures(page) for curve in figure["data"]}
    assert len(drawn_curves["predicted"]["x"]) <= MAX_POINTS


def test_runs_side_by_side_have_names(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_lines(tmp_path / f"{name}.jsonl", [{"step": step, "loss": 1.0} for step in (1, 2)])
    chart = figures(written_page(tmp_path, tmp_path / "report.html"))[0]
    assert [(series["name"], series["line"]["dash"]) for series in chart["data"]] == [
        ("one.jsonl", "solid"),
        ("two.jsonl", "dash"),
    ]


def test_a_step_of_very_many_pieces(tmp_path: Path) -> None:
    many = range(15_000)  # at which what is quadratic takes minutes
    spans = [{"track": "compute", "name": "backward", "start_s": at, "end_s": at + 0.5} for at in many]
    spans += [{"track": f"lane {at}", "name": f"bucket {at}", "start_s": at + 0.2, "end_s": at + 0.7} for at in many]
    document = {"format": "timeline", "version": 1, "spans": spans, "meta": {}}
    (tmp_path / "timeline.json").write_text(json.dumps(document))
    page = written_page(tmp_path, tmp_path / "report.html")
    (chart,) = figures(page)
    lengths = {series["name"]: sum(series["x"]) for series in chart["data"] if series["type"] == "bar"}
    assert lengths["communication, hidden"] == pytest.approx(0.3 * len(many)) == 1.5 * lengths["communication, exposed"]


def test_no_axis_is_too_short_to_be_drawn(tmp_path: Path) -> None:
    spans = [{"track": "compute", "name": "backward", "start_s": 0.0, "end_s": 5e-324}]
    spans.append({"track": "lane 0", "name": "bucket 0", "start_s": 0.0, "end_s": 1e-323})
    (tmp_path / "timeline.json").write_text(json.dumps({"format": "timeline", "version": 1, "spans": spans}))
    write_lines(tmp_path / "run.jsonl", [{"step": step, "loss": 5e-324 * step} for step in (1, 2)])
    for figure in figures(written_page(tmp_path, tmp_path / "report.html")):
        places = [(series["x"], series["y"]) for series in figure["data"]]
        places += [([shape["x0"]], [shape["x1"]]) for shape in figure["layout"].get("shapes", ())]
        for x, y in places:
            values = [abs(value) for value in (*x, *y)]
            assert all(value == 0 or value > 1e-300 for value in values)


def test_compressed_buckets_are_shown_by_name_with_what_is_sent(tmp_path: Path) -> None:
    """On a network that was measured without their kind, they are priced by its links."""
    from anabranch import load, save
    from anabranch import planning as planners
    from anabranch.tools.predict.scaling.compression import sent_nbytes
    from anabranch.values.trace import Trace

    folder = run_folder(tmp_path / "run")
    trace = load(folder / "trace.json")
    assert isinstance(trace, Trace)
    plan = planners.using(planners.single(trace, Network.ring(8, 1e-5, 1e-9)), "int8")
    save(plan, folder / "plan.json", force=True)
    shown = written_page(folder, tmp_path / "report.html")
    nbytes = sent_nbytes("int8", trace.tensors, 8)
    assert nbytes is not None and f"a rank sends {size(nbytes)}" in shown
    cells = re.search(r"<td[^>]*>int8</td>.*?</tr>", shown, re.S)
    assert cells is not None and size(nbytes) in cells[0] and ">a rank sends<" in shown
    assert "8 bytes an entry" not in shown
    save(planners.using(plan, "oktopk:0.01"), folder / "plan.json", force=True)
    assert "8 bytes an entry" in written_page(folder, tmp_path / "sparse.html")  # since a plan does not say the wire
