"""What a report reads: every kind of file by its content, and a clear word about the others."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.tools.report.documents import BenchDocument, CompareDocument, MemoryDocument, SimulateDocument
from anabranch.tools.report.page import report_page
from anabranch.tools.report.runs import MAX_FILES, Runs, parse_file, read_runs
from anabranch.tools.report.training import MAX_LINES, Training
from anabranch.tools.report.window import RankStep
from anabranch.values.errors import FileError
from tools.report.demos import demo_document
from tools.report.run_files import (
    as_json,
    bench_document,
    comparison_document,
    memory_document,
    metrics_line,
    planned_document,
    run_folder,
    scaling_document,
    window_document,
)
from tools.report.test_page import Elements, figures


def lines_of(text: str) -> list[Training]:
    found = parse_file(text.encode(), "run.jsonl")
    assert isinstance(found, list)
    return [one for one in found if isinstance(one, Training)]


def as_lines(*lines: dict[str, Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_every_kind_of_file_is_known_whatever_its_name(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(folder / f"{number}.json")
    runs = read_runs([folder])
    kinds: list[list[Any]] = [
        runs.traces, runs.networks, runs.plans, runs.timelines, runs.windows, runs.comparisons, runs.scalings,
        runs.memories, runs.benches,
    ]  # fmt: skip
    assert [len(kind) for kind in kinds] == [1] * len(kinds)
    assert len(runs.trainings) == 2 and len(runs.files) == 11 and runs.skipped == []


def test_a_folder_may_hold_other_things(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "package.json").write_text('{"name": "x"}')
    (folder / "notes.txt").write_text("hello")
    (folder / "folder.json").mkdir()
    runs = read_runs([folder])
    assert len(runs.files) == 11 and len(runs.skipped) == 1 and "package.json" in runs.skipped[0]


def test_a_folder_with_nothing_of_ours(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="without a file that is known"):
        read_runs([tmp_path])
    folder = run_folder(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="empty: a folder without a file that is known"):
        read_runs([folder / "plan.json", tmp_path / "empty"])


def test_a_folder_with_very_many_files(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 1):
        (tmp_path / f"{number}.json").touch()
    with pytest.raises(FileError, match=f"{MAX_FILES + 1} files"):
        read_runs([tmp_path])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty; the command"),
        (" \n", "is empty; the command"),
        ("{", "not valid JSON"),
        ("[1]", "holds a JSON list"),
        ('{"a": 1}', "the fields \\['a'\\]"),
        ('{"command": "lab"}', "the command 'lab'"),
        ('{"command": ["plan"]}', "the command"),
        ('{"format": "tensor"}', "'format' is 'tensor'"),
        ('{"format": ["plan"]}', "'format' is \\['plan'\\]"),
        ('{"format": {}}', "'format' is {}"),
        ('{"format": "plan", "version": 2}', "this program reads version 1"),
        ('{"traceEvents": []}', "did not write; open it in Perfetto"),
        ('{"traceEvents": [], "otherData": {"made_by": "anabranch"}}', "has no step of rank 0"),
        ('{"command": "compare", "rows": 3}', "write it again with anabranch compare --json"),
        ('{"step": 1}', "neither measured_s nor loss"),
        ('{"step": "1", "loss": 2.0}', "line 1: step"),
        ('{"step": 1, "loss": NaN}', "the loss of step 1, which is not a number"),
        ('{"step": 1, "lo', "no step that can be drawn, but line 1, which is not complete"),
        ('{"step": 1, "loss": 1.0}\nnonsense\n{"step": 2, "loss": 1.0}', "line 2: is not valid JSON"),
        ('{"step": 1, "loss": 1.0}\n' + '{"st\n' * 3, "3 lines are not complete"),
        ('{"step": 1, "loss": 1.0}\n' + "\n" * MAX_LINES, "500,001 lines: expected 500,000 at most"),
        ('{"step": 1, "loss": 1.0}\n3\n', "line 2: line"),
        ("[" * 100_000, "nested too deeply"),
        ("\x00\x01", "not valid JSON"),
    ],
)
def test_what_cannot_be_read_says_why(text: str, words: str) -> None:
    with pytest.raises(FileError, match=words) as found:
        parse_file(text.encode(), "x.json")
    assert str(found.value).startswith("x.json")


def test_a_broken_file_of_ours_in_a_folder_is_an_error(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "memory.json").write_text(json.dumps({**memory_document(), "batch_size": "8"}))
    with pytest.raises(FileError, match=r"memory\.json: batch_size: .* found '8'; write it again"):
        read_runs([folder])


@pytest.mark.parametrize("document", [bench_document(), comparison_document(), memory_document(), planned_document()])
def test_unknown_fields_of_a_later_version_are_ignored(document: dict[str, Any]) -> None:
    known = parse_file(json.dumps(document).encode(), "x")
    later = copy.deepcopy(document)
    for part in parts_of(later):
        part["weather"] = "fine"
    assert parse_file(json.dumps(later).encode(), "x") == known


def parts_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The document itself, and every object in a list in it."""
    inner = [item for value in document.values() if isinstance(value, list) for item in value]
    return [document, *(part for item in inner if isinstance(item, dict) for part in parts_of(item))]


@pytest.mark.parametrize("document", [bench_document(), comparison_document(), memory_document(), planned_document()])
def test_a_document_that_is_printed_again_is_the_same(document: dict[str, Any]) -> None:
    found = parse_file(json.dumps(document).encode(), "x")
    assert isinstance(found, BenchDocument | CompareDocument | MemoryDocument | SimulateDocument)
    assert as_json(found) == document


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        read_runs([tmp_path / "nothing.json"])


def test_a_line_that_is_still_being_written_is_left_out() -> None:
    (run,) = lines_of(as_lines(metrics_line(1), metrics_line(2)) + '{"step": 3, "ra')
    assert [line.step for line in run.lines] == [1, 2] and "not complete" in run.note


@pytest.mark.parametrize("torn", ['{"step": 3, "ra\n', '{"step": 3, "ra', '{"step": 3, "ra' + "\0" * 9 + "\n"])
def test_a_line_that_a_crash_has_torn_is_left_out(torn: str) -> None:
    first, second = lines_of(as_lines(metrics_line(1), metrics_line(2)) + torn + as_lines(*map(metrics_line, (1, 2))))
    assert [line.step for line in first.lines] == [1, 2] and [line.step for line in second.lines][-1] == 2
    assert first.note == "Left out of run.jsonl: line 3, which is not complete."
    (run,) = lines_of(torn.rstrip("\n") + "\n" + as_lines(metrics_line(1)))
    assert [line.step for line in run.lines] == [1]


@pytest.mark.parametrize("loss", ["NaN", "-Infinity", "1e999", "1e38", "null"])
def test_a_training_that_diverged_is_drawn(loss: str) -> None:
    (run,) = lines_of(f'{{"step": 1, "loss": 2.5}}\n{{"step": 2, "loss": {loss}}}\n{{"step": 3, "loss": 2.0}}\n')
    assert [line.loss for line in run.lines] == [2.5, 2.0]
    assert run.note == "Left out of run.jsonl: the loss of step 2, which is not a number."
    timed = {**metrics_line(1), "loss": float("nan")}
    (run,) = lines_of(as_lines(timed))
    assert run.lines[0].loss is None and run.lines[0].measured_s == timed["measured_s"]


def test_a_second_start_in_the_same_file_is_a_run_of_its_own() -> None:
    runs = lines_of(as_lines(*(metrics_line(step) for step in (1, 2, 3, 1, 2))))
    assert [(run.name, len(run.lines)) for run in runs] == [("run.jsonl, start 1", 3), ("run.jsonl, start 2", 2)]


def test_losses_between_metrics_that_come_late() -> None:
    losses = [{"step": step, "loss": 1.0} for step in (1, 2, 3)]
    runs = lines_of(as_lines(losses[0], losses[1], metrics_line(1), losses[2], metrics_line(2)))
    assert [[line.step for line in run.lines] for run in runs] == [[1, 2], [1, 2, 3]]


def test_ranks_of_one_file_are_apart() -> None:
    runs = lines_of(as_lines(metrics_line(1), {**metrics_line(1), "rank": 1}))
    assert [run.name for run in runs] == ["run.jsonl", "run.jsonl, rank 1"]


def test_a_window_shows_the_median_step_of_every_rank() -> None:
    found = parse_file(json.dumps(window_document()).encode(), "window.json")
    assert isinstance(found, list)
    ranks = [one for one in found if isinstance(one, RankStep)]
    assert [(one.step, one.rank) for one in ranks] == [(4, 0), (4, 1)]
    first = ranks[0].timeline
    assert first.exposed_s == pytest.approx(0.01) and first.finish_s == pytest.approx(0.05)
    assert [span.track for span in first.communication] == ["lane 0"]
    assert ranks[1].timeline.spans[0].start_s == pytest.approx(-0.02 + 1e-5)  # by rank 0's clock


def later_rank(late_us: float, error_s: float) -> list[RankStep]:
    """A window of two ranks; the buckets of rank 1 begin so much later, and clocks are known this well."""
    document = window_document()
    document["otherData"]["clock_error_s"] = {"rank 0": 0.0, "rank 1": error_s}
    for event in document["traceEvents"]:
        if event["name"].startswith("bucket") and event["pid"] == 1:
            event["ts"] += late_us - 10
    found = parse_file(json.dumps(document).encode(), "window.json")
    assert isinstance(found, list)
    return [one for one in found if isinstance(one, RankStep)]


def test_a_rank_waits_for_the_last_one_to_begin() -> None:
    first, last = later_rank(3_000, error_s=1e-3)
    ((name, wait),) = first.waits.items()
    assert name.startswith("bucket 0") and wait.rank == 1 and not last.waits
    assert wait.until_s == pytest.approx(0.01 + 0.003)
    assert not later_rank(900, error_s=1e-3)[0].waits  # the clocks may be that wrong


def test_waiting_is_drawn_apart_from_sending_and_names_the_rank() -> None:
    runs = Runs()
    runs.add("window.json", later_rank(3_000, error_s=0.0))
    page = report_page("A run", runs)
    assert "window.json: step 4, rank 0 waits 3.000 ms for rank 1." in page and "rank 1 waits" not in page
    chart = next(figure for figure in figures(page) if figure["key"] == "timelines-chart")
    bars = {series["name"]: series for series in chart["data"]}
    waiting = bars["waiting for a slower rank"]
    assert waiting["text"] == ["waits for rank 1"] and "3.000 ms" in waiting["customdata"][0]
    sent = [bars[kind]["x"][0] for kind in ("communication, hidden", "communication, exposed")]
    assert waiting["x"] == [pytest.approx(3.0)] and sum(sent) == pytest.approx(40.0 - 3.0)


def test_a_window_without_computing_is_refused() -> None:
    document = window_document()
    for event in document["traceEvents"]:
        if event["ph"] == "M" and event["args"].get("name") == "compute":
            event["args"]["name"] = "lane 7"
    with pytest.raises(FileError, match=r"window\.json: step 4 has nothing on a track named 'compute'"):
        parse_file(json.dumps(document).encode(), "window.json")


def test_a_bucket_with_a_number_that_no_bucket_has() -> None:
    document = window_document()
    for event in document["traceEvents"]:
        event["name"] = event["name"].replace("bucket 0", "bucket " + "9" * 5000)
    runs = Runs()
    runs.add("window.json", parse_file(json.dumps(document).encode(), "window.json"))
    page = report_page("A run", runs)
    (chart,) = figures(page)
    # No bucket has this number: the message is drawn by the name of its span, and no plan is shown.
    assert [at["id"] for tag, at in Elements(page).found if tag == "section"] == ["timelines", "files"]
    messages = [text for series in chart["data"] for text in series["customdata"] if "bucket 99" in text]
    # A hidden and an exposed part on two ranks, and rank 0 waits for rank 1, which is 10 µs later.
    assert len(messages) == 5 and all("…" in text for text in messages)


def test_what_ddps_own_buckets_expose_in_a_window() -> None:
    document = window_document()
    document["traceEvents"] = [event for event in document["traceEvents"] if not event["name"].startswith("bucket")]
    found = parse_file(json.dumps(document).encode(), "window.json")
    assert isinstance(found, list) and isinstance(found[0], RankStep)
    assert [(span.track, span.name) for span in found[0].timeline.communication] == [
        ("lane 0", "exposed communication")
    ]


DOCUMENTS = [bench_document(), comparison_document(), memory_document(), scaling_document(), window_document(),
             metrics_line(3), planned_document(), demo_document()]  # fmt: skip
ODD = [None, True, -1, 0, 10**400, 1e308, -1e308, 5e-324, 1.5, "", "x", "</script>", [], [None], {}, {"a": 1}]


@st.composite
def damaged(draw: st.DrawFn) -> Any:
    """One of our documents in which one value is another, or gone."""
    document = json.loads(json.dumps(draw(st.sampled_from(DOCUMENTS))))
    at = document
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = draw(st.sampled_from(keys))
        if isinstance(at[key], dict | list) and at[key] and draw(st.integers(0, 4)):
            at = at[key]
            continue
        if draw(st.booleans()):
            at[key] = draw(st.sampled_from(ODD))
        else:
            del at[key]
        return document


@pytest.mark.slow
@given(document=damaged())
def test_a_damaged_document_is_drawn_or_refused(document: Any) -> None:
    runs = Runs()
    try:
        runs.add("x", parse_file(json.dumps(document).encode(), "x"))
    except FileError as error:
        assert str(error).startswith("x")
        return
    assert "</html>" in report_page("A run", runs)
