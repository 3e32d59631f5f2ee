"""One sweep as scale was asked for it: what is compared, at which batch, and what the numbers rest on."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from anabranch.alpha_beta import AlphaBeta, TwoLevel
from anabranch.cli.output import progress
from anabranch.network_presets import NetworkRange
from anabranch.scaling import line_up
from anabranch.scaling.compression import LEAN, SparseRows, sparse_rows
from anabranch.scaling.result import Basis, Kind, NetworkUsed, ScalePoint, Scaling, Strategy
from anabranch.scaling.sweep import Compute, sweep
from anabranch.scaling.throughput import known_batch
from anabranch.trace import Trace

MANY_RANKS = 128  # from here on NCCL may prefer trees, whose latency grows with log P


class Sweep:
    """Strategies over world sizes, on any number of networks."""

    def __init__(
        self, trace: Trace, sizes: Sequence[int], planners: Sequence[str], ways: Sequence[str], basis: Basis,
        compute: Compute,
    ) -> None:  # fmt: skip
        self._trace, self._sizes, self._basis, self._compute = trace, sizes, basis, compute
        self._dense = {name: line_up.entry(name).function for name in planners}
        self._ways = ways
        self._kinds: dict[str, Kind] = dict.fromkeys(planners, "dense")
        for way in ways:
            self._kinds[way] = "lean" if way.partition(":")[0] == LEAN else "sparse"
        self._recorded = known_batch(trace)
        self._batches: Mapping[str, int] = dict.fromkeys(self._kinds, self._recorded) if self._recorded else {}
        self._words: list[str] = []

    def set_batches(self, batch: int | None, within: str | None) -> None:
        """The same batch for all, or the largest that fits for each."""
        if (batch or within) and self._recorded is None:
            raise ValueError(
                f"the trace's meta has batch {self._trace.meta.get('batch')!r}: expected for how many samples it was "
                "recorded; without that, leave out --batch and --within"
            )
        if batch and within:
            raise ValueError(f"--batch is {batch} and --within is {within}: expected one of them")
        if batch:
            self._batches = dict.fromkeys(self._kinds, batch)
        if within:
            self._fit(within)

    def _fit(self, within: str) -> None:
        from anabranch.cli.memory import within_nbytes
        from anabranch.estimate.fitting import largest_batches

        if self._basis == "strong":
            raise ValueError(
                f"--within is {within}: it finds the batch of each rank, which --scaling strong does not keep"
            )
        limit_nbytes = within_nbytes(within)
        assert limit_nbytes is not None
        fitting = largest_batches(self._trace, self._kinds, limit_nbytes, self._sizes[-1])
        self._words += fitting.words
        self._batches = {name: batch for name, batch in fitting.batches.items() if batch}
        if not self._batches:
            raise ValueError(f"--within is {within}: not one sample fits, whatever the strategy; give more")
        if left_out := [name for name in self._kinds if name not in self._batches]:
            self._words.append(f"left out, since not even one sample fits: {', '.join(left_out)}")
        self._kinds = {name: kind for name, kind in self._kinds.items() if name in self._batches}
        shown = {"dense" if self._kinds[name] == "dense" else name: batch for name, batch in self._batches.items()}
        self._words.append(f"batch per rank: {', '.join(f'{name} {batch:,}' for name, batch in shown.items())}")

    def run(self, ranges: Sequence[NetworkRange]) -> Scaling:
        """Every strategy at every size on every network."""
        points: list[ScalePoint] = []
        words: list[str] = []
        for known in ranges:
            sparse = sparse_rows(self._ways, self._trace, known.middle)
            words += sparse.assumptions
            points += self._points(known, sparse)
        used = [NetworkUsed(known.name, known.source, known.spread, known.extrapolation) for known in ranges]
        strategies = [Strategy(name, kind, self._batches.get(name)) for name, kind in self._kinds.items()]
        return Scaling(
            str(self._trace.meta.get("model", f"{len(self._trace)} gradients"))[:60], self._basis, tuple(used),
            tuple(strategies), tuple(points), **asdict(self._compute),
            assumptions=tuple(dict.fromkeys([*self._assumptions(ranges), *words])),
        )  # fmt: skip

    def _points(self, known: NetworkRange, sparse: SparseRows) -> Sequence[ScalePoint]:
        planners = {**self._dense, **sparse.planners}
        times = {name: batch / self._recorded for name, batch in self._batches.items() if self._recorded}
        steps = sweep(
            self._trace, known.middle, self._sizes, {name: planners[name] for name in self._kinds},
            network_name=known.name, scaling=self._basis, compute=self._compute, around=(known.low, known.high),
            batches=times, recorded_batch=self._recorded, pricing=sparse.pricing,
        )  # fmt: skip
        return list(progress(steps, len(self._sizes) * len(self._kinds), f"sweeping {known.name}"))

    def _assumptions(self, ranges: Sequence[NetworkRange]) -> list[str]:
        """What the numbers rest on besides the trace and the networks."""
        compute = self._compute
        weak = "batch per rank kept (weak scaling)"
        said = [weak if self._basis == "weak" else "global batch kept (strong scaling)"]
        if self._basis == "strong" or any(batch != self._recorded for batch in self._batches.values()):
            fixed = (
                f", but for {compute.fixed_share:.0%} of the recorded time, which is fixed"
                if compute.fixed_share
                else ""
            )
            said.append(f"computing takes time in proportion to the batch{fixed}")
        said += self._less_than_a_sample()
        if compute.jitter:
            said.append(f"jitter of {compute.jitter:g}: a gradient is ready when the last rank is expected to have it")
        if compute.stragglers:
            said.append(f"{compute.stragglers} of the ranks compute {compute.straggler_factor:g} times as long")
        if compute.jitter or compute.stragglers:
            said.append(
                "plans are made from the trace as recorded, with neither jitter nor stragglers, and may lose to DDP"
            )
        said += ["bands are of the network alone, each plan as made for its middle", *_of_networks(ranges, self._sizes)]
        said.append("the optimizer's step and the loading of data are not counted")
        if "lean" in self._kinds.values():
            said.append(
                "lean sends what oktopk does, so its step at the same batch is the same; its optimizer runs in backward"
            )
        return [*said, *self._words]

    def _less_than_a_sample(self) -> list[str]:
        """From where on a batch that all ranks share cannot be shared any more."""
        least = min(self._batches.values(), default=0)
        beyond = [size for size in self._sizes if size > least]
        if self._basis == "weak" or not least or not beyond:
            return []
        return [f"a batch of {least:,} has no sample for every rank from {beyond[0]:,} ranks on: only on paper"]


def _of_networks(ranges: Sequence[NetworkRange], sizes: Sequence[int]) -> list[str]:
    said = []
    if any(known.middle.contention.slowdown(2) >= 2 for known in ranges):
        said.append("one message fills a link, so that lanes gain their start-ups only")
    fitted = [known for known in ranges if known.middle.model is None]
    for known in fitted:
        if elsewhere := [size for size in sizes if size != known.middle.world_size]:
            said.append(f"{known.name} extrapolated by {known.middle.at(elsewhere[-1]).meta['assumption']}")
    if sizes[-1] >= MANY_RANKS and (fitted or any(_is_ring(known.middle.model) for known in ranges)):
        said.append(
            f"all-reduces are rings at any size; from about {MANY_RANKS} ranks on NCCL may choose trees, whose latency "
            "grows with log P instead of P (describe them as halving_doubling:...)"
        )
    return said


def _is_ring(model: AlphaBeta | TwoLevel | None) -> bool:
    links = model.across if isinstance(model, TwoLevel) else model
    return links is not None and links.algorithm == "ring"
