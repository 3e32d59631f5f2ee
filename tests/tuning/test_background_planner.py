"""Planning in the background: on rank 0 alone, with the same outcome on every rank."""

import threading
import time
from typing import Any

import torch.distributed as dist

import anabranch as ab
from anabranch.tuning.background_planner import BackgroundPlanner, Candidates
from ranks import on_ranks

PLANS = [("one", ab.Plan((ab.Bucket(("a", "b")),))), ("two", ab.Plan((ab.Bucket(("a",)), ab.Bucket(("b",), 1))))]


def planned(rank: int) -> dict[str, Any]:
    """Rank 0 plans until it is allowed to end; the other rank must never be asked to plan."""
    assert dist.group.WORLD is not None
    may_end = threading.Event()

    def plan() -> Candidates:
        assert rank == 0
        may_end.wait(30.0)
        return PLANS

    planner = BackgroundPlanner(plan, dist.group.WORLD)
    before = planner.done()
    may_end.set()
    while not planner.done():
        time.sleep(0.01)
    found, failure = planner.outcome()
    return {"before": before, "found": [[label, plan.fingerprint] for label, plan in found], "failure": failure}


def test_every_rank_gets_the_candidates_of_rank_0() -> None:
    for answer in on_ranks(planned, 2):
        assert answer["before"] is False
        assert answer["found"] == [[label, plan.fingerprint] for label, plan in PLANS] and answer["failure"] == ""


def failed(rank: int) -> list[Any]:
    assert dist.group.WORLD is not None

    def plan() -> Candidates:
        raise ZeroDivisionError("no bandwidth")

    planner = BackgroundPlanner(plan, dist.group.WORLD)
    while not planner.done():
        time.sleep(0.01)
    found, failure = planner.outcome()
    return [len(found), failure]


def test_every_rank_learns_why_planning_failed() -> None:
    assert on_ranks(failed, 2) == [[0, "ZeroDivisionError: no bandwidth"]] * 2
