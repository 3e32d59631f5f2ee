"""How a layout did, from marks on a clock that anyone can read."""

import pytest

from anabranch import Bucket, Plan
from anabranch.observe.clock import HostClock
from anabranch.observe.step_timer import StepMarks
from anabranch.tuning.trial import Trial

PLAN = Plan((Bucket(("a",)), Bucket(("b",)), Bucket(("c",), lane=1)))


def step(seconds: float, at: float = 100.0, timed: bool = True) -> StepMarks:
    """Forward takes 1 s, backward 2 s; the rest of the step is exposed communication."""
    marks = StepMarks(at, at + 1.0, at + 3.0, at + seconds)
    if timed:
        marks.buckets = [(1, at + 2.0, [at + seconds - 1.5]), (0, at + 1.5, [at + 2.5]), (2, at + 2.0, [at + 2.25])]
    return marks


def test_the_step_is_the_median_and_the_detail_is_of_one_whose_buckets_were_timed() -> None:
    steps = [step(9.0, timed=False) for _ in range(3)] + [step(seconds) for seconds in (4.0, 5.0, 6.0)]
    trial = Trial.of("a plan", PLAN, steps, HostClock())
    assert trial.steps_s == pytest.approx((9.0, 9.0, 9.0, 4.0, 5.0, 6.0))
    assert trial.step_s == pytest.approx(7.5)
    assert trial.exposed_s == pytest.approx(4.5) and trial.finish_s == pytest.approx(6.5)
    assert [timeline.iteration_s for timeline in trial.detailed] == pytest.approx([3.0, 3.5, 4.5])
    assert trial.timeline is trial.detailed[2], "of these, the one most like the median"
    assert all(not marks.buckets for marks in steps), "works that are done are released"


def test_further_steps_are_added() -> None:
    first, more = (Trial.of("a plan", PLAN, [step(seconds)], HostClock()) for seconds in (4.0, 6.0))
    both = first.with_more(more)
    assert both.steps_s == pytest.approx((4.0, 6.0)) and both.step_s == pytest.approx(5.0)
    assert both.detailed == first.detailed + more.detailed


def test_without_a_timed_bucket_there_is_no_detail() -> None:
    trial = Trial.of("a plan", PLAN, [step(5.0, timed=False)], HostClock())
    assert trial.timeline is None and trial.step_s == pytest.approx(5.0)


def test_buckets_are_on_their_lanes_one_after_another() -> None:
    timeline = Trial.of("a plan", PLAN, [step(5.0)], HostClock()).timeline
    assert timeline is not None
    spans = [(span.track, round(span.start_s, 6), round(span.end_s, 6)) for span in timeline.spans]
    assert spans == [
        ("compute", -1.0, 0.0),
        ("compute", 0.0, 2.0),
        ("lane 0", 0.5, 1.5),
        ("lane 0", 1.5, 2.5),  # launched at 1.0, while its lane was busy
        ("lane 1", 1.0, 1.25),
    ]
    assert timeline.exposed_s == pytest.approx(0.5)


def test_without_a_plan_only_what_is_exposed_is_known() -> None:
    timeline = Trial.of("DDP", None, [step(5.0, timed=False)], HostClock()).timeline
    assert timeline is not None
    assert timeline.exposed_s == pytest.approx(2.0) and timeline.iteration_s == pytest.approx(5.0)
    assert timeline.meta["source"] == "measured"
