"""Scaling: the result of a sweep over world sizes, networks and strategies, with bands."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from anabranch.values.checks import STRICT, check_seconds, repeated
from anabranch.values.kinds.names import COMPRESSED, NODES

Basis = Literal["weak", "strong"]
Kind = Literal["dense", "quantised", "sparse", "lean", "sharded"]
DDP_DEFAULT = "by_bytes"  # the planner whose defaults are those of torch's DistributedDataParallel


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """One strategy at one world size on one network; ``planner`` is the strategy's name.

    ``iteration_low_s`` and ``iteration_high_s`` are the same plan's step on the network of lowest and of highest cost
    in the band; both are ``iteration_s`` where no spread is known. ``exposed_s`` is what communication adds to compute
    time. ``speedup`` is throughput relative to one rank working alone on the trace as recorded; ``efficiency`` is
    speedup/world_size. ``samples_per_s`` counts all ranks; None if the trace does not say its batch. ``error`` is that
    of the plan (``fidelity.error_of_plan``); None where there is no plan of buckets, and in older files.
    """

    network: str
    planner: str
    world_size: int
    buckets: int
    lanes: int
    iteration_s: float
    iteration_low_s: float
    iteration_high_s: float
    exposed_s: float
    speedup: float
    efficiency: float
    samples_per_s: float | None = None
    error: float | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size is {self.world_size}: expected at least 1")
        check_seconds("iteration_high_s", self.iteration_high_s)
        if not 0 <= self.iteration_low_s <= self.iteration_s <= self.iteration_high_s:
            raise ValueError(
                f"{self.planner} takes {self.iteration_s} s at {self.world_size} ranks, outside its band of "
                f"{self.iteration_low_s} to {self.iteration_high_s} s"
            )

    @property
    def efficiencies(self) -> tuple[float, float]:
        """Efficiency on the network of highest cost in the band, and on that of lowest cost."""
        if not self.iteration_low_s:
            return self.efficiency, self.efficiency
        ideal_s = self.efficiency * self.iteration_s
        return ideal_s / self.iteration_high_s, ideal_s / self.iteration_low_s


class Ran(NamedTuple):
    """What a strategy did at one world size: its buckets and lanes, its step on each of the networks, and its error."""

    buckets: int
    lanes: int
    steps_s: list[float]
    error: float | None = None


Curves = Mapping[str, Mapping[int, ScalePoint]]  # strategy -> world size -> point


@dataclass(frozen=True, slots=True)
class Strategy:
    """A planner, alone, with compressed buckets or on Lean, or a sharding mode of FSDP2.

    ``batch`` is per rank (weak scaling) or global (strong).
    """

    name: str
    kind: Kind
    batch: int | None = None

    @property
    def sends(self) -> Literal["dense", "quantised", "sparse"]:
        """Every value in full, every value rounded, or some; by the kind in the name, for hsdp the one behind @."""
        if self.kind == "lean":
            exchange = self.name.removesuffix(NODES).partition(":")[2]
            rounds = exchange.removeprefix("auto:") in (*COMPRESSED, "auto")
            return "quantised" if rounds else "sparse"
        if self.kind == "sharded":
            exchange = self.name.partition("@")[2]
            return "quantised" if exchange in COMPRESSED else "sparse" if exchange else "dense"
        return self.kind


@dataclass(frozen=True, slots=True)
class NetworkUsed:
    """A network by name: the source of its costs, its band, and how its costs at other world sizes were derived."""

    name: str
    source: str
    spread: str
    extrapolation: str


@dataclass(frozen=True, slots=True)
class Scaling:
    """A whole scaling study: points, assumptions, and the answer in sentences. ``scale --json`` prints this document.

    ``scaling`` says which batch stays the same as ranks are added: that of each rank (weak) or the global one (strong).
    Points are ordered by network, then world size, then strategy.
    """

    __pydantic_config__: ClassVar = STRICT

    model: str
    scaling: Basis
    networks: tuple[NetworkUsed, ...]
    strategies: tuple[Strategy, ...]
    points: tuple[ScalePoint, ...]
    jitter: float = 0.0  # to ``fixed_share``: of retired options, which older files have
    stragglers: int = 0
    straggler_factor: float = 1.0
    seed: int = 0
    fixed_share: float = 0.0
    assumptions: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()
    written: str | None = None
    command: Literal["scale"] = "scale"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        for name in ("networks", "strategies", "points", "assumptions", "answer"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for what, names in (
            ("network", [n.name for n in self.networks]),
            ("strategy", [s.name for s in self.strategies]),
        ):
            if twice := repeated(names):
                raise ValueError(f"a scaling has the {what} {twice!r} twice: expected a name of its own for each")
        sizes = self.world_sizes
        places = len(self.networks) * len(sizes) * len(self.strategies)
        # A generator: a small file may name more networks and strategies than a list of all combinations has room for.
        expected = ((n.name, s.name, size) for n in self.networks for size in sizes for s in self.strategies)
        found = ((point.network, point.planner, point.world_size) for point in self.points)
        wrong = next((place for place, point in zip(expected, found, strict=False) if place != point), None)
        if not self.points or len(self.points) != places or wrong:
            missing = f" ({wrong} is missing)" if wrong else ""
            raise ValueError(
                f"a scaling has {len(self.points)} points for {places} places{missing}: expected one for every "
                "network, world size and strategy, in this order"
            )

    @property
    def world_sizes(self) -> list[int]:
        """The world sizes of the sweep, rising."""
        return sorted({point.world_size for point in self.points})

    def on(self, network: str) -> Curves:
        """The points of one network by strategy, then by world size."""
        curves: dict[str, dict[int, ScalePoint]] = {strategy.name: {} for strategy in self.strategies}
        for point in self.points:
            if point.network == network:
                curves[point.planner][point.world_size] = point
        return curves
