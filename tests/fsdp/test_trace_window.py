"""watch.trace_steps: steps of a sharded model on all ranks, on three tracks and one clock, in one file."""

import json
import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import anabranch as ab
from anabranch.observe import trace_window
from anabranch.tools.report.window import rank_steps
from fsdp.small_model import BLOCKS, batch_of, model_of, train, two_nodes
from observe.trace_events import check_format, of_rank
from ranks import on_ranks

KINDS = ("int8", None)
UNITS = [str(i) for i in range(1, BLOCKS + 1)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[list[int]], dict[str, Any]]]:
    """By int8 and as HSDP: the groups on every rank, and the file."""
    folder = tmp_path_factory.mktemp("windows")
    found = on_ranks(windows, 4, str(folder))
    documents = [json.loads((folder / f"{kind}.json").read_text()) for kind in KINDS]
    return [([rank[number] for rank in found], document) for number, document in enumerate(documents)]


def windows(rank: int, folder: str) -> list[list[int]]:
    return [window(f"{folder}/{kind}.json", kind) for kind in KINDS]


def window(path: str, compress: str | None) -> list[int]:
    """Steps 2 and 3 of four, each of two batches; groups before, during and after."""
    mesh = two_nodes()
    model = model_of(mesh["shard"] if compress else mesh)
    replication = ab.replicate(model, mesh, compress=compress) if compress else None
    watch = ab.watch(model)
    groups = [len(dist.distributed_c10d._world.pg_map)]
    watch.trace_steps(2, 3, path)
    groups.append(len(dist.distributed_c10d._world.pg_map))
    for step in range(8):
        model.set_requires_gradient_sync(step % 2 == 1)  # type: ignore[operator]
        model(batch_of(step)).square().mean().backward()
    groups.append(len(dist.distributed_c10d._world.pg_map))
    watch.close()
    if replication is not None:
        replication.close()
    return groups


def test_steps_of_all_ranks_are_in_one_file(written: list[tuple[list[list[int]], dict[str, Any]]]) -> None:
    for groups, document in written:
        for before, during, after in groups:
            assert during == before + 1 and after == before, "the window's own group is gone with it"
        check_format(document)
        check_steps(document)


def check_steps(document: dict[str, Any]) -> None:
    facts = document["otherData"]
    assert (facts["first_step"], facts["last_step"], facts["ranks"], facts["device"]) == (2, 3, 4, "cpu")
    for rank in range(4):
        names = {event["tid"]: event["args"]["name"] for event in of_rank(document, rank, name="thread_name")}
        assert names == {0: "compute", 1: "inside", 2: "between"}
        for step in (2, 3):
            slices = [event for event in of_rank(document, rank, ph="X") if event["args"]["step"] == step]
            by_track = {track: [e["name"] for e in slices if e["tid"] == track] for track in names}
            assert by_track[2] == [f"average {unit}" for unit in ("3", "2", "1", "the rest")]
            assert {f"{what} {unit}" for what in ("gather", "reduce") for unit in UNITS} < set(by_track[1])
            assert {f"gather {unit} again" for unit in UNITS} < set(by_track[1]), "freed after forward"
            assert {f"{what} {unit}" for what in ("forward", "backward") for unit in UNITS} < set(by_track[0])
            assert ("update" in by_track[0]) == (step == 2), "the last step's optimizer is not over when it is written"
        inside, between = ([0, 1] if rank < 2 else [2, 3]), ([0, 2] if rank % 2 == 0 else [1, 3])
        for event in of_rank(document, rank, cat="communication"):
            assert event["args"]["ranks"] == (inside if event["tid"] == 1 else between)


def test_a_page_shows_which_rank_was_waited_for(written: list[tuple[list[list[int]], dict[str, Any]]]) -> None:
    """A rank waits for those of its node inside, and for those with its shard between nodes."""
    document = deepcopy(written[0][1])
    document["otherData"]["clock_error_s"] = {}
    begin_us: dict[tuple[int, str], float] = {}  # the same on all ranks, but for two messages that rank 3 begins late
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            late = event["pid"] == 3 and event["name"] in ("gather 1", "average 2")
            event["ts"] = begin_us.setdefault((event["args"]["step"], event["name"]), event["ts"]) + 500.0 * late
    ranks = rank_steps(document, "steps.json")
    assert [(one.rank, {name: wait.rank for name, wait in one.waits.items()}) for one in ranks] == [
        (0, {}), (1, {"average 2": 3}), (2, {"gather 1": 3}), (3, {})
    ]  # fmt: skip


def refusals(rank: int, folder: str) -> list[str]:
    watch = ab.watch(model := model_of(two_nodes()))
    said = []
    cases: list[tuple[Any, Any, str]] = [
        (0, 1, "a.json"), (3, 2, "a.json"), (1, 2 + rank, "a.json"), (1, 2, "there.json")
    ]  # fmt: skip
    for first, last, name in cases:
        with pytest.raises((ValueError, ab.DisagreementError, ab.FileError)) as caught:
            watch.trace_steps(first, last, f"{folder}/{name}")
        said.append(str(caught.value))
    train(model, range(2))
    watch.trace_steps(3, 9, f"{folder}/never.json")
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    trace_window.log.addHandler(handler)
    train(model, range(2))
    watch.close()
    return [*said, *warned]


def test_wrong_windows_are_refused_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("mine")
    for said in on_ranks(refusals, 4, str(tmp_path)):
        order, length, differ, there, closed = said
        assert "from 0 to 1: expected numbers from 1 on" in order
        assert "from 3 to 2: expected a last step from 3 to 102" in length
        assert "the window given to trace_steps() is not the same on all ranks" in differ
        assert "there.json: is already there" in there
        assert "closed before step 9: no trace was written" in closed
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"]
