"""Clocks: the host's own, and the poller that observes when works complete, with fake works and events."""

import threading
from dataclasses import dataclass
from time import sleep
from typing import Any, cast

import pytest
import torch

from anabranch.observe.clock import CompletionPoller, CudaClock, HostClock, PendingCompletion


@dataclass
class FakeEventOrWork:
    """An event and a work in one, complete as soon as a test says so."""

    complete: bool = False
    fails: bool = False

    def query(self) -> bool:
        if self.fails:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return self.complete

    def is_completed(self) -> bool:
        return self.query()


def poller_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "anabranch-completion-poller"]


def completion(launched: FakeEventOrWork, last: FakeEventOrWork) -> PendingCompletion:
    return PendingCompletion(cast(Any, launched), cast(Any, last))


def test_the_poller_notes_launch_and_end_in_this_order() -> None:
    launched, last, poller = FakeEventOrWork(), FakeEventOrWork(complete=True), CompletionPoller()
    observed = completion(launched, last)
    poller.watch(observed)
    sleep(0.02)
    assert observed.launched_s is None and observed.ended_s is None  # what has not been launched cannot be over
    launched.complete, last.complete = True, False
    while observed.launched_s is None:
        sleep(0.01)
    last.complete = True
    poller.join(60.0)
    assert observed.ended_s is not None and observed.ended_s >= observed.launched_s


def test_the_thread_ends_when_nothing_is_pending_and_starts_again() -> None:
    poller = CompletionPoller()
    for _ in range(3):
        pending = [completion(FakeEventOrWork(complete=True), FakeEventOrWork(complete=True)) for _ in range(5)]
        for one in pending:
            poller.watch(one)
        poller.join(60.0)
        assert all(one.ended_s is not None for one in pending)
        assert not poller_threads()


@pytest.mark.parametrize("how", ["closed", "failed"])
def test_a_work_that_never_completes_keeps_no_thread(how: str) -> None:
    poller, launched = CompletionPoller(), FakeEventOrWork()
    observed = completion(launched, FakeEventOrWork())
    poller.watch(observed)
    launched.fails = how == "failed"
    if how == "closed":
        poller.close()
    poller.join(60.0)  # it gives up at once
    assert not poller_threads()
    assert observed.ended_s is None
    after = completion(FakeEventOrWork(complete=True), FakeEventOrWork(complete=True))  # the next is still observed
    poller.watch(after)
    poller.join(60.0)
    assert after.ended_s is not None


def test_an_end_that_was_not_observed_has_no_time() -> None:
    clock = CudaClock(torch.device("cpu"))
    assert clock.elapsed_to_end_s(None, completion(FakeEventOrWork(), FakeEventOrWork())) is None
    clock.close()


def test_the_hosts_clock() -> None:
    clock = HostClock()
    start = clock.mark()
    sleep(0.01)
    end = clock.mark_end(start, [])
    seconds = clock.elapsed_to_end_s(start, end)
    assert seconds is not None and seconds >= 0.01 and clock.settled(end)
