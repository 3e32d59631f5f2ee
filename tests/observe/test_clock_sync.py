"""Clock synchronisation: the stated error bounds the true offset, and drift between two measurements is removed."""

import pytest
import torch.distributed as dist

from anabranch.observe.clock import HostClock
from anabranch.observe.clock_sync import ClockAlignment, HostAnchor, Offset, clock_offsets
from ranks import on_ranks


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


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
