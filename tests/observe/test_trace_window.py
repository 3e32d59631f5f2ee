"""One trace of all ranks: clocks that are known to within an error, and a file that Perfetto can open."""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from anabranch import Bucket, DataParallel, DisagreementError, FileError, Lean, Plan
from anabranch.observe import clock
from anabranch.observe.clock import ClockAlignment, HostAnchor, HostClock, Offset, clock_offsets
from anabranch.observe.step_timer import StepMarks, StepObserver
from anabranch.observe.trace_window import perfetto_document
from observe.trace_events import check_format, of_rank
from parallel.twins import SCENARIOS, WIDTH, batch, mlp, plain_train, ring, scattered, sgd
from ranks import on_ranks

HOSTILE = '</script><img src=x onerror=alert(1)>"\\\u2028'


class Named(nn.Module):
    """Layers of which one has a name that a careless viewer would run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(2)
        self.register_parameter(HOSTILE, nn.Parameter(torch.ones(WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x) * self.get_parameter(HOSTILE)
        return result


def a_window(rank: int, path: str) -> int:
    """Steps 3 to 5 of a plan with two lanes, after some others."""
    torch.manual_seed(7)
    module = Named()
    names = list(dict(module.named_parameters()))
    plan = Plan((Bucket(tuple(names[3:])), Bucket(tuple(names[1:3]), lane=1), Bucket(tuple(names[:1]))))
    model = DataParallel(module, plan=plan, network=ring(), profile_steps=2)
    optimizer = sgd(model)
    plain_train(model, optimizer, 0)
    model.trace_steps(3, 5, path)
    for step in range(1, 8):
        plain_train(model, optimizer, step)
    left = [len(parameter._post_accumulate_grad_hooks or ()) for parameter in module.parameters()]
    assert not any(left), "nothing is left of the window"
    model.close()
    return len(plan)


def test_four_ranks_on_one_clock(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    (buckets, *_) = on_ranks(a_window, 4, str(path))
    document = json.loads(path.read_text())
    check_format(document)
    errors_us = [document["otherData"]["clock_error_s"][f"rank {rank}"] * 1e6 for rank in range(4)]
    assert errors_us[0] == 0 and all(error > 0 for error in errors_us[1:])
    launches: dict[tuple[int, str], list[tuple[int, float]]] = defaultdict(list)
    ends: dict[tuple[int, str], list[tuple[int, float]]] = defaultdict(list)
    for rank in range(4):
        (name,) = of_rank(document, rank, name="process_name")
        assert name["args"]["name"].startswith(f"rank {rank} (")
        assert rank == 0 or f"±{errors_us[rank]:.1f} µs" in name["args"]["name"]
        for part in ("forward", "backward"):
            assert [event["args"]["step"] for event in of_rank(document, rank, ph="X", name=part)] == [3, 4, 5]
        ready = of_rank(document, rank, ph="i")
        assert len(ready) == 3 * 5 and HOSTILE in {event["name"] for event in ready}
        messages = of_rank(document, rank, cat="communication")
        assert len(messages) == 3 * buckets and {event["tid"] for event in messages} == {2, 3}
        assert any(HOSTILE in event["args"]["tensors"] for event in messages)
        for event in messages:
            key = (event["args"]["step"], event["name"])
            assert event["args"]["launched_us"] <= event["ts"]
            launches[key].append((rank, event["args"]["launched_us"]))
            ends[key].append((rank, event["ts"] + event["dur"]))
    assert len(ends) == 3 * buckets
    for key, all_ends in ends.items():
        # An all-reduce ends nowhere before it was launched everywhere.
        for launched_by, launched_us in launches[key]:
            for ended_on, end_us in all_ends:
                assert end_us >= launched_us - errors_us[launched_by] - errors_us[ended_on] - 1e-2
    for step in (3, 4, 5):
        # Nor does a step, with all its averages, before every rank has begun its backward.
        backward = {
            r: e["ts"] for r in range(4) for e in of_rank(document, r, name="backward") if e["args"]["step"] == step
        }
        last = max(end for (of, _), found in ends.items() if of == step for _, end in found)
        assert last >= max(backward.values()) - max(errors_us)


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


class Truth(StepObserver):
    """An observer that keeps when steps truly began, by the clock that all ranks of this machine share."""

    def __init__(self, ahead_s: Callable[[float], float]) -> None:
        self.began_s: list[float] = []
        self._ahead_s = ahead_s

    def on_step_end(self, step: StepMarks) -> None:
        assert isinstance(step.forward, float)
        self.began_s.append(self._ahead_s(step.forward))

    def close(self) -> None:
        pass


def shifted(rank: int, path: str) -> list[float]:
    """As on other machines: each rank's clock runs an hour ahead of that of the rank before it, and faster."""
    host, start_s, pace = time.perf_counter, time.perf_counter(), 1 + 1e-4 * rank

    def own() -> float:
        return start_s + 3600.0 * rank + pace * (host() - start_s)

    setattr(clock, "perf_counter", own)  # noqa: B010 - it is no name of the module's own
    HostClock.mark = lambda self: own()  # type: ignore[method-assign]
    HostClock.mark_end = lambda self, launched, works: own()  # type: ignore[method-assign]
    names = tuple(name for name, _ in mlp().named_parameters())
    model = DataParallel(mlp(), plan=Plan((Bucket(names),)), profile_steps=0)
    truth = Truth(lambda said_s: start_s + (said_s - start_s - 3600.0 * rank) / pace)
    assert model._tuner is not None
    model._tuner.runner.timer.observers.append(truth)
    model.trace_steps(1, 6, path)
    for step in range(6):
        plain_train(model, sgd(model), step)
        time.sleep(0.02)  # for clocks to drift
    model.close()
    return truth.began_s


def test_clocks_of_other_machines_are_brought_together(tmp_path: Path) -> None:
    """Every instant in the file is where it truly was, within the error that the file states."""
    truth = on_ranks(shifted, 4, str(tmp_path / "trace.json"))
    document = json.loads((tmp_path / "trace.json").read_text())
    check_format(document)
    written = [[event["ts"] for event in of_rank(document, rank, name="forward")] for rank in range(4)]
    for rank in range(4):
        error_us = document["otherData"]["clock_error_s"][f"rank {rank}"] * 1e6
        assert error_us < 3e9, "an hour of offset is not taken for error"
        for began_s, began_us in zip(truth[rank], written[rank], strict=True):
            assert began_us - written[0][0] == pytest.approx((began_s - truth[0][0]) * 1e6, abs=error_us + 0.1)


def other_layouts(rank: int, folder: str) -> None:
    """A window over all stages of planning, one under DDP's own buckets, one under Lean."""
    keeping = SCENARIOS["keeps the plan"]
    model = DataParallel(mlp(), planner=scattered, network=ring(), profile_steps=2, policy=keeping)
    model.trace_steps(1, 60, f"{folder}/planned.json")
    for step in range(60):
        plain_train(model, sgd(model), step)
    model.close()
    stock = DataParallel(mlp(), network=ring(), profile_steps=100)
    stock.trace_steps(1, 2, f"{folder}/stock.json")
    for step in range(2):
        plain_train(stock, sgd(stock), step)
    stock.trace_steps(3, 9, f"{folder}/never.json")
    stock.close()
    lean: Any = DataParallel(mlp(), memory=Lean(optimizer=lambda p: torch.optim.SGD(p, lr=0.1)), profile_steps=0)
    lean.trace_steps(1, 1, f"{folder}/lean.json")
    lean(batch(0)).square().mean().backward()
    lean.close()


def test_other_layouts(tmp_path: Path) -> None:
    on_ranks(other_layouts, 2, str(tmp_path))
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(found) == {"planned", "stock", "lean"}, "a window that is not over at close() leaves no file"
    for document in found.values():
        check_format(document)
        assert of_rank(document, 1, name="backward")
        assert {event["name"] for event in of_rank(document, 1, ph="i")} == dict(mlp().named_parameters()).keys()
    plans = {event["args"]["step"]: event["args"]["plan"] for event in of_rank(found["planned"], 1, name="backward")}
    assert list(plans) == list(range(1, 61)) and plans[1] is None and plans[60] is not None
    messages = Counter(event["args"]["step"] for event in of_rank(found["planned"], 1, cat="communication"))
    assert set(messages) == {step for step, plan in plans.items() if plan is not None}
    assert len(set(messages.values())) == 1, "all buckets of every planned step, also of trials"
    assert not of_rank(found["stock"], 1, cat="communication"), "DDP's own buckets are not timed"


def refusals(rank: int, folder: str) -> None:
    """Wrong windows are refused on every rank, and training continues."""
    model = DataParallel(mlp(), network=ring(), profile_steps=100)
    optimizer = sgd(model)
    plain_train(model, optimizer, 0)
    with pytest.raises(ValueError, match="from 1 to 3: expected numbers from 2 on"):
        model.trace_steps(1, 3, f"{folder}/a.json")
    with pytest.raises(ValueError, match="expected a last step from 5 to 104"):
        model.trace_steps(5, 4, f"{folder}/a.json")
    with pytest.raises(ValueError, match="expected a last step from 5 to 104"):
        model.trace_steps(5, 105, f"{folder}/a.json")
    with pytest.raises(DisagreementError, match="rank 0 has 'steps 2 to 2, and 2 comes next'"):
        model.trace_steps(2 + rank, 2 + rank, f"{folder}/a.json")
    with pytest.raises(FileError, match="is already there"):
        model.trace_steps(2, 2, f"{folder}/taken.json")
    model.trace_steps(2, 2, f"{folder}/taken.json", force=True)
    model.trace_steps(2, 3, f"{folder}/nowhere/b.json")  # cannot be written: an error in the log
    for step in range(3):
        plain_train(model, optimizer, step)
    model.close()
    with pytest.raises(RuntimeError, match="closed"):
        model.trace_steps(9, 9, f"{folder}/a.json")


def test_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken.json").write_text("{}")
    on_ranks(refusals, 2, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["taken.json"]
    check_format(json.loads((tmp_path / "taken.json").read_text()))


def clocks(rank: int) -> list[list[float]]:
    """All ranks of this machine read one clock, so every offset is zero, and the stated error must hold that."""
    return [[found.ahead_s, found.error_s] for _ in range(3) for found in clock_offsets(world())]


def test_the_stated_error_holds_the_true_offset() -> None:
    first, *others = on_ranks(clocks, 3)
    assert len(first) == 9 and others == [[], []]
    for ahead_s, error_s in first:
        assert abs(ahead_s) <= error_s


def test_drift_between_two_measurements_is_removed() -> None:
    alignment = ClockAlignment(Offset(100.0, 10.0, 1e-5), Offset(200.0, 10.5, 3e-5))
    assert alignment.to_rank_0_time(100.0) == pytest.approx(90.0)
    assert alignment.to_rank_0_time(150.0) == pytest.approx(150 - 10.25)
    assert alignment.to_rank_0_time(200.0) == pytest.approx(189.5)
    assert alignment.to_rank_0_time(300.0) == pytest.approx(289.5), "no extrapolation"
    assert alignment.error_s == 3e-5


def test_an_anchor_bounds_the_hosts_time_at_its_mark() -> None:
    anchor = HostAnchor.measure(HostClock())
    assert isinstance(anchor.mark, float)
    assert abs(anchor.mark - anchor.host_s) <= anchor.error_s


def test_the_stated_errors_include_those_of_devices() -> None:
    step = {"step": 1, "plan": None, "edges_s": [5.0, 6.0, 8.0, 8.0], "ready_s": {"a": 7.0}, "buckets": []}
    recordings = [{"anchor_error_s": 1e-6, "steps": [step]}, {"anchor_error_s": 2e-6, "steps": [step]}]
    same = ClockAlignment(Offset(0.0, 0.0, 0.0), Offset(9.0, 0.0, 0.0))
    other = ClockAlignment(Offset(0.0, 1.0, 4e-6), Offset(9.0, 1.0, 3e-6))
    document = perfetto_document(recordings, [same, other], {"device": "cuda"})
    check_format(document)
    assert document["otherData"]["clock_error_s"] == {"rank 0": 0.0, "rank 1": pytest.approx(7e-6)}
    assert [of_rank(document, rank, name="forward")[0]["ts"] for rank in (0, 1)] == [1e6, 0]
    assert not of_rank(document, 0, name="exposed communication"), "nothing was exposed"
