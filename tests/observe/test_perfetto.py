"""The Perfetto document: times of all ranks on rank 0's clock, with the errors of hosts and devices."""

import pytest

from anabranch.observe.clock_sync import ClockAlignment, Offset
from anabranch.observe.perfetto import perfetto_document
from observe.trace_events import check_format, of_rank


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
