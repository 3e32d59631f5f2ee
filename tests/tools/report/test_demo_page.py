"""The page of a demo, the headlines of all pages; what flattens a scaling plot is hidden."""

import json
from pathlib import Path
from typing import Any

import pytest

from anabranch.tools.report.benchmark import benchmark_chart
from anabranch.tools.report.page import headline
from anabranch.tools.report.runs import Runs, parse_file
from tools.report.demos import SLOW_S, demo, demo_document
from tools.report.run_files import (
    bench_document,
    comparison_document,
    metrics_line,
    planned_document,
    scaling_document,
    write_lines,
    written_page,
)
from tools.report.test_page import Elements, figures


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("demo")
    (folder / "demo.json").write_text(json.dumps(demo_document()))
    (folder / "scale.json").write_text(json.dumps(scaling_document()))
    return written_page(folder, folder / "report.html")


def test_a_demo_in_three_sections(page: str) -> None:
    titles = ["1. Your network is the limit", "2. Compressed: loss over time", "3. At your size"]
    places = [page.index(f">{title}</h2>") for title in titles]
    assert places == sorted(places)
    keys = [figure["key"] for figure in figures(page)]
    assert keys == ["demo-limit-chart", "demo-loss-chart", "scaling-0-0"]


def test_the_page_opens_with_the_headline_and_its_conditions(page: str) -> None:
    words = '<p class="headline">A step with int8 is 2.50× as fast as DDP&#39;s here'
    assert page.index(words) < page.index('<dl class="tiles">') < page.index("<section")
    assert '<p class="note">Measured in this run: 2 hosts, 100 Mbit/s links.</p>' in page


def test_every_number_of_the_pictures_is_the_documents(page: str) -> None:
    found = demo()
    by_key = {figure["key"]: figure for figure in figures(page)}
    computing, exposed, predicted, _ = by_key["demo-limit-chart"]["data"]
    steps_ms = [1e3 * found.benchmark.row(one.name).step_s for one in found.trainings]
    assert [a + b for a, b in zip(computing["x"], exposed["x"], strict=True)] == pytest.approx(steps_ms)
    assert computing["x"] == pytest.approx([1e3 * SLOW_S["compute only"]] * len(steps_ms))
    assert predicted["x"] == pytest.approx([0.9 * step_ms for step_ms in steps_ms])
    curves = {series["name"]: series for series in by_key["demo-loss-chart"]["data"]}
    assert list(curves) == [one.name for one in found.trainings]
    assert all(curves[one.name]["x"] == list(one.elapsed_s) for one in found.trainings)


def test_what_was_chosen_and_kept_in_memory(page: str) -> None:
    assert (
        "int8, wrap(model, int8, long_" in page
        and "_): int8 was chosen" in page
        and "Output of model.explain(), auto" in page
    )
    assert ">1.5 MiB</td>" in page and ">512.0 KiB</td>" in page


def test_a_network_that_is_no_limit(tmp_path: Path) -> None:
    alike = {**dict.fromkeys(SLOW_S, 0.02), "compute only": 0.019}
    (tmp_path / "demo.json").write_text(json.dumps(demo_document(steps_s=alike)))
    page = written_page(tmp_path, tmp_path / "page.html")
    assert "1. The network is not the limit here" in page and "2. Compressed" in page
    assert "Nothing is gained here" in page


def test_a_hostile_demo_adds_no_element(page: str, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=owned>%{x}"
    document = json.loads(json.dumps(demo_document(link=hostile)).replace("was chosen", hostile))
    (tmp_path / "demo.json").write_text(json.dumps(document))
    (tmp_path / "scale.json").write_text(json.dumps(scaling_document()))
    found = written_page(tmp_path, tmp_path / "page.html")
    assert [tag for tag, _ in Elements(found).found] == [tag for tag, _ in Elements(page).found] and "<img" not in found


def test_bars_leave_room_for_their_texts() -> None:
    chart = benchmark_chart("key", "label", demo().benchmark)
    assert chart.layout["xaxis"]["range"][1] > 1.1 * 1e3 * SLOW_S["DDP"]


# ---------------------------------------------------------------------------------------------------- headlines


def headline_of(*documents: dict[str, Any]) -> str:
    runs = Runs()
    for number, document in enumerate(documents):
        runs.add(f"{number}.json", parse_file(json.dumps(document).encode(), "x.json"))
    return headline(runs)


def test_headlines_of_documents() -> None:
    bench = bench_document()
    assert (
        headline_of(comparison_document(), bench)
        == "resnet50: DataParallel is no faster than DDP beyond the noise (90.00 ms a step, DDP 105.0 ms)."
    )
    bench["benchmarks"][0]["rows"][1]["buckets"] = 4
    assert "resnet50: DataParallel is 1.17× as fast as DDP (90.00 ms a step, DDP 105.0 ms)." in headline_of(bench)
    assert headline_of(scaling_document(), comparison_document()) == ""  # nothing was measured


def test_headlines_of_a_training(tmp_path: Path) -> None:
    own = [{**metrics_line(step), "plan": None, "measured_s": 0.2} for step in range(1, 5)]
    planned = [{**metrics_line(step), "measured_s": 0.1} for step in range(5, 9)]
    for lines, expected in (
        ([*own, *planned], "The plan in force is 2.00× as fast as DDP&#39;s own buckets (100.0 ms a step"),
        ([*own, *({**line, "measured_s": 0.2} for line in planned)], "The plan in force is no faster"),
        (own, "Nothing is gained: run.jsonl ends with DDP&#39;s own buckets, 200.0 ms a step."),
    ):
        (tmp_path / "run.jsonl").unlink(missing_ok=True)
        write_lines(tmp_path / "run.jsonl", lines)
        (tmp_path / "page.html").unlink(missing_ok=True)
        assert f'<p class="headline">{expected}' in written_page(tmp_path, tmp_path / "page.html")


def test_a_predicted_step_has_tiles(tmp_path: Path) -> None:
    (tmp_path / "step.json").write_text(json.dumps(planned_document()))
    page = written_page(tmp_path, tmp_path / "page.html")
    assert "headline" not in page[page.index("<body>") :]
    assert "<dt>Step, predicted</dt><dd>400.0 ms</dd>" in page and "<span>25.0% of this step</span>" in page
