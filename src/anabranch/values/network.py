"""Network: what a collective costs, alone and at the same time as others, at a given world size."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from typing import ClassVar, Self

from anabranch.values.checks import NO_META, STRICT, Meta, ReadOnly, check_positive, check_seconds, frozen_meta
from anabranch.values.curve import Curve, Points
from anabranch.values.errors import NetworkError
from anabranch.values.kinds.names import DENSE, is_two_level, two_level
from anabranch.values.links import AlphaBeta, TwoLevel


@dataclass(frozen=True, slots=True)
class Contention:
    """How simultaneous messages slow each other: k at once each take ``slowdown(k)`` times as long to transfer.

    ``slowdowns[k-1]`` is given for the first few k; beyond them it keeps rising by the last step. The published law
    1 + η(k−1) is ``slowdowns=(1, 1+η)``. ``link_cap`` is what the link carries in all, in units of what one message
    takes by itself: k messages never exceed it together. Start-up costs overlap freely.
    """

    slowdowns: tuple[float, ...] = (1.0, 2.0)
    link_cap: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "slowdowns", tuple(self.slowdowns))
        if not self.slowdowns or self.slowdowns[0] != 1:
            raise ValueError(f"slowdowns are {self.slowdowns}: the first must be 1, a message by itself")
        for before, after in pairwise(self.slowdowns):
            check_positive("a slowdown", after)
            if after < before:
                raise ValueError(f"slowdowns fall from {before} to {after}: more messages are never faster each")
        if self.link_cap is not None:
            check_positive("link_cap", self.link_cap)
            if self.link_cap < 1:
                raise ValueError(f"link_cap is {self.link_cap}: one message alone already takes 1, expected ≥ 1")

    @classmethod
    def law(cls, eta: float, link_cap: float | None = None) -> Self:
        """1 + η(k−1): η = 0 is no interference, η = 1 a link that one message fills."""
        check_seconds("eta", eta)
        return cls((1.0, 1.0 + eta), link_cap)

    def slowdown(self, k: int) -> float:
        """How many times longer each of ``k`` simultaneous transfers takes than by itself."""
        known = self.slowdowns
        if k <= len(known):
            own = known[max(k, 1) - 1]
        else:
            own = known[-1] + (known[-1] - known[-2] if len(known) > 1 else 1.0) * (k - len(known))
        return own if self.link_cap is None else max(own, k / self.link_cap)


@dataclass(frozen=True, slots=True)
class InsideNodes:
    """What a two-level exchange costs inside nodes of ``ranks_per_node`` ranks, by the bytes of the bucket.

    scatter   each rank gets the sum, over the ranks of its node, of its share of the bucket
    gather    each rank gets the averages of all shares
    """

    ranks_per_node: int
    scatter: Curve
    gather: Curve

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node is {self.ranks_per_node}: expected at least 1")

    @classmethod
    def modelled(cls, world_size: int, model: TwoLevel) -> Self:
        """What the formula says."""
        scatter, gather = model.inside_lines(world_size)
        return cls(model.ranks_per_node, Curve.linear(*scatter), Curve.linear(*gather))

    def shifted(self, spreads: float) -> Self:
        """Both curves moved by ``spreads`` times their measured spread."""
        return replace(self, scatter=self.scatter.shifted(spreads), gather=self.gather.shifted(spreads))


ALL_GATHER, REDUCE_SCATTER = "all_gather", "reduce_scatter"

FULL_LINK = Contention()  # what is assumed where nothing was measured: one message fills the link


@dataclass(frozen=True, slots=True)
class Network:
    """What each kind of collective costs among ``world_size`` ranks.

    ``curves`` are per collective and hold at this world size only; ``model``, where there is one, is the formula
    they came from, and lets ``at`` price another world size. Unless told otherwise (``eta``), one message is taken
    to fill the link, so that simultaneous messages gain nothing but their start-up. ``delays`` are the seconds by which
    sending a message holds up the computing after it, by collective: a host that launches an exchange launches nothing
    else meanwhile. Only live steps show them; nothing is taken for what is not named.

    Of a two-level kind, such as "int8@nodes", the curve has what ranks exchange between nodes, all ranks of a node at
    once, by the bytes of the whole bucket; ``inside`` has the rest, None if there are no nodes or it costs nothing.
    """

    __pydantic_config__: ClassVar = STRICT

    world_size: int
    curves: Mapping[str, Curve] = field(hash=False)
    contention: Contention = FULL_LINK
    model: AlphaBeta | TwoLevel | None = None
    meta: Meta = field(default_factory=dict, hash=False)
    delays: Mapping[str, float] = field(default_factory=dict, hash=False)
    inside: InsideNodes | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "curves", ReadOnly(self.curves))
        object.__setattr__(self, "delays", ReadOnly(self.delays))
        for collective, delay_s in self.delays.items():
            check_seconds(f"delay by a message of {collective}", delay_s)
        object.__setattr__(self, "meta", frozen_meta(self.meta))
        if self.world_size < 1:
            raise ValueError(f"world_size is {self.world_size}: expected at least 1")
        if "dense" not in self.curves:
            raise ValueError(f"a network prices {sorted(self.curves)}: expected at least 'dense', the plain all-reduce")

    @classmethod
    def linear(cls, world_size: int, start_s: float, s_per_byte: float, *, eta: float = 1.0,
               link_cap: float | None = None) -> Self:  # fmt: skip
        """T(M) = start_s + s_per_byte · M for M bytes."""
        return cls(world_size, {"dense": Curve.linear(start_s, s_per_byte)}, Contention.law(eta, link_cap))

    @classmethod
    def ring(cls, world_size: int, alpha_s: float, beta_s_per_byte: float, gamma_s_per_byte: float = 0.0, *,
             eta: float = 1.0, link_cap: float | None = None) -> Self:  # fmt: skip
        """Ring all-reduce: 2(N−1) steps of latency α; every byte crosses a link 2(N−1)/N times."""
        model = AlphaBeta("ring", alpha_s, beta_s_per_byte, gamma_s_per_byte)
        return cls.modelled(world_size, model, Contention.law(eta, link_cap))

    @classmethod
    def tree(cls, world_size: int, alpha_s: float, beta_s_per_byte: float, gamma_s_per_byte: float = 0.0, *,
             eta: float = 1.0, link_cap: float | None = None) -> Self:  # fmt: skip
        """Binary tree, reduce then broadcast: few steps, but each carries the whole message."""
        model = AlphaBeta("tree", alpha_s, beta_s_per_byte, gamma_s_per_byte)
        return cls.modelled(world_size, model, Contention.law(eta, link_cap))

    @classmethod
    def halving_doubling(cls, world_size: int, alpha_s: float, beta_s_per_byte: float,
                         gamma_s_per_byte: float = 0.0, *, eta: float = 1.0,
                         link_cap: float | None = None) -> Self:  # fmt: skip
        """Recursive halving and doubling: the ring's volume in logarithmically many steps."""
        model = AlphaBeta("halving_doubling", alpha_s, beta_s_per_byte, gamma_s_per_byte)
        return cls.modelled(world_size, model, Contention.law(eta, link_cap))

    @classmethod
    def two_level(cls, world_size: int, ranks_per_node: int, inside: AlphaBeta, across: AlphaBeta, *,
                  eta: float = 1.0, link_cap: float | None = None) -> Self:  # fmt: skip
        """Reduce-scatter inside each node, all-reduce across nodes, all-gather inside (``AlphaBeta`` links)."""
        return cls.modelled(world_size, TwoLevel(ranks_per_node, inside, across), Contention.law(eta, link_cap))

    @classmethod
    def modelled(cls, world_size: int, model: AlphaBeta | TwoLevel, contention: Contention = FULL_LINK) -> Self:
        """A network whose dense curve comes from a formula."""
        return cls(world_size, {"dense": Curve.linear(*model.line(world_size))}, contention, model)

    @classmethod
    def measured(cls, world_size: int, curves: Points | Mapping[str, Points], *,
                 contention: Contention = FULL_LINK, meta: Meta = NO_META) -> Self:  # fmt: skip
        """From measured (nbytes, seconds[, spread_s]) points, of the dense all-reduce or by kind of collective."""
        by_kind = curves if isinstance(curves, Mapping) else {"dense": curves}
        through = {kind: Curve.through(points) for kind, points in by_kind.items()}
        return cls(world_size, through, contention, None, meta)

    def curve(self, collective: str) -> Curve:
        """The cost curve of one kind of collective."""
        if collective not in self.curves:
            raise NetworkError(
                f"this network has no cost for the collective {collective!r}, only for {sorted(self.curves)}: "
                "measure it, or plan with one of those"
            )
        return self.curves[collective]

    def seconds(self, collective: str, nbytes: int) -> float:
        """Cost of one message by itself."""
        return self.curve(collective).seconds(nbytes)

    def inside_s(self, collective: str, nbytes: int) -> tuple[float, float]:
        """What a bucket of ``nbytes`` costs inside nodes, before and after it is exchanged between them."""
        if self.inside is None or not is_two_level(collective):
            return 0.0, 0.0
        return self.inside.scatter.seconds(nbytes), self.inside.gather.seconds(nbytes)

    def delay_s(self, collective: str) -> float:
        """By how much sending one message holds up the computing after it."""
        return self.delays.get(collective, 0.0)

    def allreduce_s(self, nbytes: int) -> float:
        """Cost of one dense all-reduce of ``nbytes`` by itself."""
        return self.curves["dense"].seconds(nbytes)

    def at(self, world_size: int) -> Self:
        """The same links with another number of ranks.

        A network with a model follows it. A measured one is taken to be a ring whose latency and bandwidth are those
        of its straight-line fit; meta['assumption'] then says so. Only the dense collective can be carried over, and if
        there are nodes, what they cost inside and the dense collective between them: a ring of as many nodes as needed.
        """
        if world_size == self.world_size:
            return self
        model, meta, inside = self.model, self.meta, self.inside
        if model is None:
            if self.world_size < 2:
                raise NetworkError(
                    f"a network of {self.world_size} rank cannot be carried to {world_size}: it has no links; "
                    "measure at least 2 ranks, or give a model such as Network.ring"
                )
            model = AlphaBeta.ring_like(self.world_size, *self.curves["dense"].line())
            meta = {**meta, "assumption": f"ring fitted to {self.world_size} ranks: alpha {model.alpha_s:.3g} s, "
                    f"beta {model.beta_s_per_byte:.3g} s/B"}  # fmt: skip
        carried = type(self).modelled(world_size, model, self.contention)
        curves = dict(carried.curves)
        if inside is not None and isinstance(model, TwoLevel):
            inside = InsideNodes.modelled(world_size, model)
        elif inside is not None and (between := self.curves.get(two_level(DENSE))) is not None:
            here, there = (ceil(ranks / inside.ranks_per_node) for ranks in (self.world_size, world_size))
            if here > 1:
                curves[two_level(DENSE)] = Curve.linear(*AlphaBeta.ring_like(here, *between.line()).line(there))
        return replace(carried, curves=curves, meta=meta, delays=self.delays, inside=inside)

    def shifted(self, spreads: float) -> Self:
        """Every curve moved by ``spreads`` times its measured spread: higher costs, or lower ones if negative."""
        inside = self.inside.shifted(spreads) if self.inside is not None else None
        curves = {kind: curve.shifted(spreads) for kind, curve in self.curves.items()}
        return replace(self, curves=curves, model=None, inside=inside)
