"""Networks from live ranks, and the arithmetic of slowdowns under a clock that is told what to say."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic, sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from anabranch import Network
from anabranch.exchange.compression import probe_of
from anabranch.exchange.groups import clone_group
from anabranch.exchange.interface import Group
from anabranch.exchange.lanes import Lanes
from anabranch.exchange.two_level import stage_probes
from anabranch.observe import measure as module
from anabranch.observe.clock import HostClock
from anabranch.observe.environment import NETWORK_NOTE
from anabranch.observe.measure import measure
from anabranch.values.files import dumps
from anabranch.values.network import ALL_GATHER, REDUCE_SCATTER
from anabranch.values.nodes import Nodes
from ranks import on_ranks

CPU = torch.device("cpu")


def groups(count: int) -> list[Group]:
    group = dist.group.WORLD
    assert group is not None
    return [group, *(clone_group(group, "gloo", f"test lane {lane}") for lane in range(1, count))]


def quietly(*args: Any, **options: Any) -> Network:
    """Measure on a machine that may well be busy with other tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return measure(*args, **options)


def facts_of(network: Network) -> dict[str, Any]:
    return {
        "text": dumps(network),
        "world_size": network.world_size,
        "curves": {
            kind: [(point.nbytes, point.seconds, point.spread_s) for point in curve.points]
            for kind, curve in network.curves.items()
        },
        "slowdowns": list(network.contention.slowdowns),
        "meta": {key: str(value) for key, value in network.meta.items()},
    }


def two_kinds_on_four_lanes(rank: int) -> dict[str, Any]:
    lanes = groups(4)
    timed = {kind: probe_of(kind) for kind in ("dense", "bf16")}
    return facts_of(quietly(lanes, CPU, largest_nbytes=100_001, budget_s=0.3, collectives=timed))


@pytest.mark.slow
def test_what_is_measured_and_that_all_ranks_hold_the_same() -> None:
    first, second, third = on_ranks(two_kinds_on_four_lanes, 3)
    assert first["text"] == second["text"] == third["text"]
    assert first["world_size"] == 3
    for kind in ("dense", "bf16"):
        points = first["curves"][kind]
        assert [nbytes for nbytes, _, _ in points] == [1 << k for k in range(10, 17)] + [100_000]
        assert all(seconds > 0 and spread_s >= 0 for _, seconds, spread_s in points)
        assert [s for _, s, _ in points] == sorted(s for _, s, _ in points)
    slowdowns = first["slowdowns"]
    assert len(slowdowns) == 4 and slowdowns[0] == 1.0 and slowdowns == sorted(slowdowns)
    assert first["meta"]["backend"] == "gloo" and first["meta"]["source"] == "measured"
    assert float(first["meta"]["median_relative_spread"]) >= 0


def one_lane(rank: int) -> dict[str, Any]:
    return facts_of(quietly(groups(1), CPU, largest_nbytes=1, budget_s=0.05))


def test_one_lane_and_a_largest_message_that_is_too_small_to_matter() -> None:
    first, second = on_ranks(one_lane, 2)
    assert first["text"] == second["text"]
    assert [nbytes for nbytes, _, _ in first["curves"]["dense"]] == [1024, 2048]
    assert first["slowdowns"] == [1.0, 2.0]  # not tried: taken for a link that one message fills


def sharded_collectives(rank: int) -> dict[str, Any]:
    """Three ranks, so that no power of two is a whole number of shares."""
    everyone = groups(1)
    collectives = {**module.JUST_DENSE, **module.SHARDED}
    return facts_of(quietly(everyone, CPU, largest_nbytes=1 << 16, budget_s=0.1, collectives=collectives))


def test_all_gather_and_reduce_scatter_by_the_bytes_of_the_whole_tensor() -> None:
    first, *others = on_ranks(sharded_collectives, 3)
    assert all(other["text"] == first["text"] for other in others)
    dense = [nbytes for nbytes, _, _ in first["curves"]["dense"]]
    for kind in (ALL_GATHER, REDUCE_SCATTER):
        sizes = [nbytes for nbytes, seconds, _ in first["curves"][kind] if seconds > 0]
        assert sizes == [nbytes // 12 * 12 for nbytes in dense]


def on_nodes(rank: int) -> dict[str, Any]:
    """Two nodes of two ranks: two kinds flat and on two levels, and all-gathers, which have one level."""
    assert dist.group.WORLD is not None
    lanes = Lanes(dist.group.WORLD, CPU)
    lanes.grow(1)
    lanes.use_nodes(Nodes(((0, 2), (1, 3))), [0])
    timed = {"dense": probe_of("dense"), "int8": probe_of("int8"), ALL_GATHER: module.SHARDED[ALL_GATHER]}
    network = quietly(lanes.groups[:1], CPU, 1 << 14, 0.2, timed, nodes=lanes[0].nodes)
    lanes.close()
    inside = network.inside
    assert inside is not None
    stages = [[(point.nbytes, point.seconds) for point in curve.points] for curve in (inside.scatter, inside.gather)]
    return {**facts_of(network), "per_node": inside.ranks_per_node, "stages": stages}


@pytest.mark.slow
def test_two_levels_are_measured_by_the_bytes_of_the_whole_bucket() -> None:
    first, *others = on_ranks(on_nodes, 4)
    assert all(other["text"] == first["text"] for other in others)
    assert set(first["curves"]) == {"dense", "int8", ALL_GATHER, "dense@nodes", "int8@nodes"}
    assert first["per_node"] == 2
    sizes = [1 << k for k in range(10, 15)]
    for kind in ("dense", "int8", "dense@nodes", "int8@nodes"):
        assert [nbytes for nbytes, _, _ in first["curves"][kind]] == sizes
    for stage in first["stages"]:
        assert [nbytes for nbytes, _ in stage] == sizes and all(seconds > 0 for _, seconds in stage)


def probed(rank: int) -> dict[str, list[Any]]:
    """What the exchanges for timing do to a buffer, of every size from one element."""
    assert dist.group.WORLD is not None
    lanes = Lanes(dist.group.WORLD, CPU)
    lanes.grow(1)
    lanes.use_nodes(Nodes.of_size(4, 2), [0])
    groups = lanes[0].nodes
    assert groups is not None
    probes = stage_probes({"dense": probe_of("dense")}, groups)
    found: dict[str, list[Any]] = {name: [] for name in probes}
    for numel in (1, 2, 5):
        for name, probe in probes.items():
            buffer = torch.arange(numel) + 10.0 * rank
            module.drive(probe(buffer, lanes[0].group, 4.0))
            found[name].append(buffer.tolist())
    lanes.close()
    return found


def test_what_is_timed_on_two_levels_sends_what_training_sends() -> None:
    first, second, third, _ = on_ranks(probed, 4)
    assert list(first) == ["scatter", "gather", "dense@nodes"]
    # The mean, over a node, of its rank's half; both halves, of whole ones; and half a bucket between ranks 0 and 2.
    assert first["scatter"][2] == [5.0, 6.0, 2.0, 3.0, 4.0] and second["scatter"][2] == [7.0, 8.0, 12.0, 13.0, 14.0]
    assert first["gather"][2] == [*second["gather"][2][:4], 4.0] == [0.0, 1.0, 10.0, 11.0, 4.0]
    assert first["dense@nodes"][2] == [10.0, 11.0, 2.0, 3.0, 4.0] and third["dense@nodes"][2][:2] == [10.0, 11.0]
    assert first["dense@nodes"][0] == [10.0], "a bucket of one element, too"


def gathered_and_scattered(rank: int) -> list[list[float]]:
    everyone = groups(1)[0]
    mine = torch.full((6,), float(rank + 1))
    module.drive(module.all_gather(mine, everyone, 3.0))
    copies = torch.arange(6.0)
    module.drive(module.reduce_scatter(copies, everyone, 3.0))
    return [mine.tolist(), copies[2 * rank : 2 * rank + 2].tolist()]


def test_what_is_timed_is_what_it_is_called() -> None:
    for rank, (gathered, scattered) in enumerate(on_ranks(gathered_and_scattered, 3)):
        assert gathered == [1, 1, 2, 2, 3, 3]
        assert scattered == [3 * 2 * rank, 3 * (2 * rank + 1)]


def test_sizes_of_whole_shares() -> None:
    assert module.whole_shares([1024, 2048, 4100], 3) == [1020, 2040, 4092]
    assert module.whole_shares([1024, 2048, 1 << 20], 1024) == [4096, 1 << 20]


def with_a_note(rank: int) -> str:
    os.environ[NETWORK_NOTE] = "emulated: 2 hosts (delays, not a real network)"
    return facts_of(quietly(groups(1), CPU, largest_nbytes=1, budget_s=0.05))["meta"]["emulated"]  # type: ignore[no-any-return]


def test_the_note_of_the_launcher_is_kept_beside_the_numbers() -> None:
    assert on_ranks(with_a_note, 2) == ["emulated: 2 hosts (delays, not a real network)"] * 2


class SlowClock(HostClock):
    """Every action takes a second, by this clock."""

    def elapsed_s(self, start: object, end: object) -> float:
        return 1.0


class FastClock(HostClock):
    """Every action takes a microsecond, by this clock."""

    def elapsed_s(self, start: object, end: object) -> float:
        return 1e-6


def repetitions(rank: int) -> list[int]:
    """How often an action that takes a second (by rank 0's clock; others' clocks are far off) is repeated."""
    counts = []
    for budget_s in (0.001, 0.6, 1.5, 12.0, 1e9):
        stopwatch = module.Stopwatch(groups(1)[0], SlowClock() if rank == 0 else FastClock())
        counts.append(len(stopwatch.repeat(lambda: None, budget_s)))
    return counts


def test_the_budget_bounds_the_repetitions_alike_on_every_rank() -> None:
    fewest, most = module.REPEATS
    assert on_ranks(repetitions, 2) == [[1, 2, fewest, 12, most]] * 2


def contending_starts(rank: int) -> tuple[list[int], list[tuple[float, float]]]:
    """How often an action is repeated where two pairs of ranks share links, and when each began and ended.

    Ranks wait for each other for no time, or in the end for one second and a half.
    """
    waited = [0.0, 0.0, 0.0, 1.5]
    module.perf_counter = lambda: waited.pop(0)  # type: ignore[attr-defined]
    mesh = init_device_mesh("cpu", (2, 2))
    nodes, inside = mesh.get_group(0), mesh.get_group(1)
    stopwatch = module.Stopwatch(nodes, SlowClock() if rank == 0 else FastClock(), contending=inside)
    spans = []

    def action() -> None:
        begun_s = monotonic()
        sleep(0.02 if rank % 2 else 0.06)  # one pair is done long before the other
        spans.append((begun_s, monotonic()))

    counts = [len(stopwatch.repeat(action, 6.0))]
    return [*counts, len(stopwatch.repeat(lambda: None, 6.0))], spans


def test_ranks_that_share_links_start_every_message_together() -> None:
    (_, first), (_, second), (_, third), (_, fourth) = found = on_ranks(contending_starts, 4)
    for counts, _ in found:
        assert counts == [6, 4], "by the clock of rank 0, which is in one of the pairs; waiting takes time, too"
    for one, other in ((first, second), (second, first), (third, fourth), (fourth, third)):
        for (_, ended_s), (begun_s, _) in zip(one, other[1:], strict=False):
            assert begun_s >= ended_s, "a message began before its neighbour's last one had ended"


def test_a_poor_measurement_is_told() -> None:
    quiet = Network.linear(2, 1e-3, 1e-9)
    noisy, steady = (replace(quiet, meta={"median_relative_spread": spread}) for spread in (0.8, 0.1))
    assert "vary by 80%" in module.noise_note(noisy) and "--budget-s" in module.noise_note(noisy)
    assert module.noise_note(steady) == module.noise_note(quiet) == ""


def remeasured(rank: int) -> tuple[list[float], list[int]]:
    """Points: the third was held up, the fourth costs that much, the last no more than its parts, but for noise.

    Ranks but the first see other numbers.
    """
    told = {1: [1.0], 2: [1.5], 4: [9.0, 2.5], 8: [30.0, 31.0], 16: [61.0]}
    asked: list[int] = []

    def point(nbytes: int) -> tuple[int, float, float]:
        asked.append(nbytes)
        return nbytes, told[nbytes].pop(0) if rank == 0 else 1.0, 0.0

    found = module._points(module.Stopwatch(groups(1)[0], HostClock()), list(told), point)
    return [seconds for _, seconds, _ in found], asked


def test_a_size_that_costs_more_than_its_parts_is_measured_again() -> None:
    (first, asked), (_, asked_of_other) = on_ranks(remeasured, 2)
    assert first == [1.0, 1.5, 2.5, 30.0, 61.0]
    assert asked == asked_of_other == [1, 2, 4, 4, 8, 8, 16]


class Told:
    """A stopwatch that does nothing and says what k messages at once took."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self._seconds, self.asked = seconds, 0

    def repeat(self, action: Any, budget_s: float) -> list[float]:
        (count,) = action.args
        self.asked += 1
        return [self._seconds[count]] * 3


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        # One message: 0.1 s to start and 1 s to transfer. Two share the link fully, four twice over.
        ({1: 1.1, 2: 2.1, 4: 4.1}, [1.0, 2.0, 3.0, 4.0]),
        # A link that one message cannot fill: two at once cost nothing more; three lie between two and four.
        ({1: 1.1, 2: 1.1, 4: 1.6}, [1.0, 1.0, 1.25, 1.5]),
        # Noise that makes two faster than one, or four faster than two, is no gain.
        ({1: 1.1, 2: 0.6, 4: 0.5}, [1.0, 1.0, 1.0, 1.0]),
        ({1: 1.1, 2: 2.1, 4: 1.1}, [1.0, 2.0, 2.0, 2.0]),
    ],
)
def test_slowdowns_of_transfers_without_their_start(seconds: dict[int, float], expected: Sequence[float]) -> None:
    lanes: list[Any] = [None] * 4
    found = module.slowdowns(Told(seconds), lanes, CPU, 1 << 10, 0.1, 1.0)  # type: ignore[arg-type]
    assert found == pytest.approx(expected)


def test_two_lanes_need_two_probes_and_a_start_that_outweighs_all_is_survived() -> None:
    told = Told({1: 0.1, 2: 0.1})
    assert module.slowdowns(told, [None, None], CPU, 1 << 10, 0.2, 1.0) == [1.0, 1.0]  # type: ignore[list-item, arg-type]
    assert told.asked == 2
    assert [module.lane_counts(lanes) for lanes in (1, 2, 3, 4, 5, 8)] == [
        [1],
        [2],
        [2, 3],
        [2, 4],
        [2, 4, 5],
        [2, 4, 8],
    ]


def test_sizes_rise_to_the_largest() -> None:
    for largest in (2048, 2049, 100_001, 64 << 20, (64 << 20) + 3):
        sizes = module.message_sizes(largest)
        assert sizes == sorted(set(sizes)) and sizes[0] == 1024 and sizes[-1] == largest // 4 * 4
        assert all(nbytes % 4 == 0 for nbytes in sizes)


def test_the_probe_is_the_first_size_whose_transfer_outweighs_its_start() -> None:
    points = [(1024, 1.0, 0.0), (2048, 5.0, 0.0), (4096, 11.0, 0.0), (8192, 20.0, 0.0)]
    assert module.contention_nbytes(points) == 4096
    assert module.contention_nbytes(points[:2]) == 2048


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"budget_s is 0\.0: expected more than zero seconds"):
        measure([], CPU, budget_s=0.0)
    with pytest.raises(ValueError, match="budget_s is nan"):
        measure([], CPU, budget_s=float("nan"))


def ranks_whose_clocks_disagree(rank: int) -> dict[str, Any]:
    """Each rank finds another size whose transfer outweighs its start-up."""
    module.contention_nbytes = lambda points: points[-1 - rank][0]
    return facts_of(quietly(groups(2), CPU, largest_nbytes=1 << 16, budget_s=0.1))


def test_ranks_that_measure_differently_still_send_the_same_sizes() -> None:
    first, second = on_ranks(ranks_whose_clocks_disagree, 2)
    assert first["text"] == second["text"]
