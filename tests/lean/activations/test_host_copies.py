"""Copies between device and host: what each waits for, on streams that only write down what they are told."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from anabranch.lean.activations.host_copies import BlockingCopies, CudaCopies, HostCopies, copies_for
from lean.activations.lazy_copies import LazyCopies

LOG: list[str] = []


class Stream:
    """In place of ``torch.cuda.Stream``."""

    made = 0

    def __init__(self, device: Any = None) -> None:
        Stream.made += 1
        self.name = f"stream {Stream.made}"

    def wait_stream(self, other: "Stream") -> None:
        LOG.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        LOG.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        LOG.append(f"{self.name} records")
        return f"event {len(LOG)}"

    def synchronize(self) -> None:
        LOG.append(f"host waits for {self.name}")


class Copied(torch.Tensor):
    """A tensor that writes down when it is copied to."""

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        LOG.append("copy" if non_blocking else "blocking copy")
        return super().copy_(source, non_blocking)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaCopies:
    """Copies on streams 1 (to the host) and 2 (to the device), called on stream 3."""
    LOG.clear()
    Stream.made = 0

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        LOG.append(f"on {stream.name}:")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    copies = CudaCopies(torch.device("cuda", 0))
    current = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    return copies


def tensor() -> torch.Tensor:
    return torch.zeros(4).as_subclass(Copied)


def test_a_copy_to_the_host_waits_for_the_current_stream_and_its_events(cuda: Any) -> None:
    assert cuda.to_host(torch.ones(4), tensor(), (None, "event a")) == "event 5"
    assert LOG == [
        "stream 1 waits for stream 3",
        "stream 1 waits for event a",
        "on stream 1:",
        "copy",
        "stream 1 records",
    ]


def test_a_copy_to_the_device_waits_for_its_events_alone(cuda: Any) -> None:
    assert cuda.to_device(torch.ones(4), tensor(), ("event a", "event b", None)) == "event 5"
    assert LOG == [
        "stream 2 waits for event a",
        "stream 2 waits for event b",
        "on stream 2:",
        "copy",
        "stream 2 records",
    ]


def test_who_waits_for_whom_otherwise(cuda: Any) -> None:
    cuda.after_current_stream()
    cuda.wait(None)
    cuda.wait("event a")
    cuda.synchronize()
    with cuda.on_device_copy_stream():
        pass
    assert LOG == [
        "stream 2 waits for stream 3",
        "stream 3 waits for event a",
        "host waits for stream 1",
        "on stream 2:",
    ]


@pytest.mark.parametrize("copies", [BlockingCopies(), LazyCopies()])
def test_bytes_arrive_whoever_copies(copies: HostCopies) -> None:
    source, host, target = torch.arange(4.0), torch.zeros(4), torch.zeros(4)
    out = copies.to_host(source, host)
    copies.after_current_stream()
    back = copies.to_device(host, target, (out,))
    with copies.on_device_copy_stream():
        copies.wait(back)
    assert copies.is_done(back) and copies.is_done(out)
    assert torch.equal(target, source)
    copies.synchronize()
    assert torch.equal(host, source)


def test_a_lazy_copy_leaves_garbage_until_somebody_waits() -> None:
    copies = LazyCopies()
    source, host, target = torch.ones(4), torch.zeros(4), torch.zeros(4)
    out = copies.to_host(source, host)
    assert host.isnan().all() and not copies.is_done(out)
    back = copies.to_device(host, target)  # whoever forgets to come after the copy out
    copies.wait(back)
    assert target.isnan().all()


def test_models_on_the_cpu_have_blocking_copies() -> None:
    assert isinstance(copies_for(torch.device("cpu")), BlockingCopies)
