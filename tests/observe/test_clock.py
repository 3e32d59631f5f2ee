"""Clocks: the host's own, and the lookout that sees when works are over, with works and events that obey."""

from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, cast

import pytest
import torch

from anabranch.observe.clock import CompletionPoller, CudaClock, HostClock, Sighting


@dataclass
class Obedient:
    """An event and a work in one, past as soon as it is told to be."""

    past: bool = False
    fails: bool = False

    def query(self) -> bool:
        if self.fails:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return self.past

    def is_completed(self) -> bool:
        return self.query()


def sighting(launched: Obedient, last: Obedient) -> Sighting:
    return Sighting(cast(Any, launched), cast(Any, last))


def test_the_lookout_notes_when_launch_and_end_pass_in_this_order() -> None:
    launched, last, lookout = Obedient(), Obedient(past=True), CompletionPoller()
    seen = sighting(launched, last)
    lookout.watch(seen)
    sleep(0.02)
    assert seen.launched_s is None and seen.ended_s is None  # what has not been launched cannot be over
    launched.past, last.past = True, False
    sleep(0.05)
    last.past = True
    lookout.join(5.0)
    assert seen.launched_s is not None and seen.ended_s is not None
    assert 0.01 < seen.ended_s - seen.launched_s < 5


def test_the_thread_ends_when_nothing_is_left_to_see_and_begins_again() -> None:
    lookout = CompletionPoller()
    for _ in range(3):
        seen = [sighting(Obedient(past=True), Obedient(past=True)) for _ in range(5)]
        for one in seen:
            lookout.watch(one)
        lookout.join(5.0)
        assert all(one.ended_s is not None for one in seen)
    assert lookout._thread is None


@pytest.mark.parametrize("how", ["closed", "failed"])
def test_what_is_never_over_keeps_no_thread(how: str) -> None:
    lookout, launched = CompletionPoller(), Obedient()
    seen = sighting(launched, Obedient())
    lookout.watch(seen)
    launched.fails = how == "failed"
    if how == "closed":
        lookout.close()
    begun = monotonic()
    lookout.join(5.0)
    assert monotonic() - begun < 4 and lookout._thread is None
    assert seen.ended_s is None
    after = sighting(Obedient(past=True), Obedient(past=True))  # and the next is seen all the same
    lookout.watch(after)
    lookout.join(5.0)
    assert after.ended_s is not None


def test_an_end_that_was_not_seen_has_no_time() -> None:
    clock = CudaClock(torch.device("cpu"))
    unseen = sighting(Obedient(), Obedient())
    assert clock.until(None, unseen) is None
    clock.close()


def test_the_hosts_clock() -> None:
    clock = HostClock()
    start = clock.mark()
    sleep(0.01)
    end = clock.mark_end(start, [])
    seconds = clock.until(start, end)
    assert seconds is not None and 0.01 <= seconds < 5 and clock.settled(end)
