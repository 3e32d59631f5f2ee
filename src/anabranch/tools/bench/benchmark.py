"""Runs one benchmark: a workload on the ranks of the default process group, from tuning to the finished figures."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from anabranch.exchange.compression import Compress
from anabranch.exchange.nodes import GivenNodes
from anabranch.parallel import DataParallel
from anabranch.tools.bench.compiled import (
    CountingBackend,
    compiled_name,
    compiled_references,
    compiled_step,
    start_compiler,
)
from anabranch.tools.bench.compress_option import compression
from anabranch.tools.bench.contestants import (
    DDP_OPTIONS,
    Contestant,
    ddp_contestants,
    planned_contestants,
    reference_contestants,
)
from anabranch.tools.bench.progress import Say, SearchProgress
from anabranch.tools.bench.race import RaceSettings, race_all
from anabranch.tools.bench.sharded import sharded_contestants
from anabranch.tools.bench.workload import Workload
from anabranch.tools.bench.zoo import Step
from anabranch.tools.report.documents import BASELINE, COMPUTE, OURS, Benchmark
from anabranch.tuning.options import TuningPolicy
from anabranch.tuning.trial import predicted_s
from anabranch.values.errors import AnabranchError
from anabranch.values.kinds.names import EVERY_ELEMENT
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

FLAT = ", flat"  # the end of a contestant's name
MAX_TUNING_STEPS = 1000  # tuning usually takes 45 to 120
# Also measures and tries where little is predicted to be gained: the other contestants need a network.
THOROUGH = TuningPolicy(min_predicted_gain=-0.05, first_search_steps=100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RaceSettings):
    """How long to measure, and which contestants.

    only           if given, contestants whose name contains one of these
    compiled       computing alone, DDP and every DataParallel also under torch.compile
    flat           every DataParallel also with ``nodes=False``
    sharded        names of ``fsdp.planning.sharding_modes.SHARDING_MODES``
    search_steps   what each search may cost, and the steps after those that record in which it ends at its next
                   decision, with the best layout so far, for which graphs are still compiled; None: as ``THOROUGH``
    """

    profile_steps: int = 6
    compress: Sequence[str] = ()
    only: Sequence[str] = ()
    compiled: bool = False
    flat: bool = False
    sharded: Sequence[str] = ()
    search_steps: int | None = None

    @property
    def parallels(self) -> dict[str, "Variant"]:
        """The DataParallels that can race, by name."""
        kinds: dict[str, Compress] = {OURS: None, **{f"{OURS}, {text}": compression(text) for text in self.compress}}
        flat = {f"{name}{FLAT}": Variant(kind, nodes=False) for name, kind in kinds.items() if self.flat}
        return {**{name: Variant(kind) for name, kind in kinds.items()}, **flat}


class Variant(NamedTuple):
    """How a DataParallel is called."""

    compress: Compress
    nodes: GivenNodes = "auto"


@dataclass(frozen=True, slots=True)
class TunedModel:
    """A DataParallel that has finished tuning, with its trace, network and step, and its name as a contestant."""

    name: str
    compress: Compress
    parallel: DataParallel
    step: Step
    trace: Trace
    network: Network

    def contestant(self) -> Contestant:
        """Stop planning, and return the contestant."""
        self.parallel.hold()
        plan = self.parallel.plan
        expected_s = predicted_s(self.trace, plan, self.network)
        return Contestant.ready(self.name, partial(self.step, self.parallel), plan, expected_s)


# More contestants for a model and its step, given a trace, a network and the plans of compressed DataParallels.
MoreContestants = Callable[[nn.Module, Step, Trace, Network, Sequence[Plan]], Sequence[Contestant]]


def run_benchmark(workload: Workload, settings: Settings, say: Say, more: MoreContestants = lambda *_: ()) -> Benchmark:
    """Let DataParallel tune itself, then race all contestants. Collective; ``say`` gets a line of progress at times."""
    if dist.get_world_size() == 1:
        raise AnabranchError("there is one rank, so nothing to send and nothing to compare: run at least two")
    say(f"{workload.name}: DataParallel profiles, measures, plans and chooses")
    named = settings.parallels.items()
    ours, *others = (tune(workload, settings, name, variant, say) for name, variant in named)
    contestants = _contestants(workload, settings, ours, others, more)
    backends: dict[str, CountingBackend] = defaultdict(CountingBackend)
    twins: list[TunedModel] = []
    if settings.compiled:
        start_compiler(workload.device)
        twins = [tune(workload, settings, name, one, say, backends[compiled_name(name)]) for name, one in named]
        contestants += compiled_references(workload, backends)
        contestants += [twin.contestant() for twin in twins]
    tuned = [ours, *others, *twins]
    benchmark = race_all(workload, settings, contestants, ours.trace, say)
    explanation = "\n\n".join(model.parallel.explain() for model in tuned)
    for model in tuned:
        model.parallel.close()
    skipped = () if _on_nccl() else ("PowerSGD: torch's hook waits inside a callback, which hangs on Gloo",)
    compile_s = {name: tuple(backend.steps_s) for name, backend in backends.items()}
    rows = tuple(replace(row, compile_s=compile_s.get(row.name, ())) for row in benchmark.rows)
    return replace(benchmark, rows=rows, explanation=explanation, skipped=skipped)


def tune(
    workload: Workload,
    settings: Settings,
    name: str,
    variant: Variant,
    say: Say,
    backend: CountingBackend | None = None,
) -> TunedModel:
    """A DataParallel on a model of its own, run until it has chosen a layout; compiled if there is a backend."""
    model, step = workload.build()
    policy, limit = THOROUGH, settings.search_steps
    if limit is not None:  # not by hold(), after which graphs would stay cut finely
        policy = replace(policy, first_search_steps=limit, max_search_steps=settings.profile_steps + limit)
    # No cache: a benchmark measures what DataParallel finds here, and rivals need a trace and a network of today.
    options = {"profile_steps": settings.profile_steps, "policy": policy, "cache": False, **DDP_OPTIONS}
    parallel = DataParallel(model, **variant._asdict(), **options)
    if backend is not None:
        name, step = compiled_name(name), compiled_step(step, parallel, backend)
    progress = SearchProgress(f"{workload.name}, {name}", say)
    while parallel.timeline is None:  # until it has chosen a layout
        step(parallel)
        if progress.step_done() == MAX_TUNING_STEPS:
            raise RuntimeError(
                f"DataParallel has not chosen a layout in {MAX_TUNING_STEPS} steps: {parallel.explain()}"
            )
    if parallel.trace is None or parallel.network is None:  # its search has used up its budget: steps vary by much
        raise RuntimeError(
            "DataParallel has measured no network, which the other contestants need: run it again, on a quieter "
            f"machine; {parallel.explain()}"
        )
    progress.chosen(parallel.timeline.iteration_s, backend.steps_s if backend is not None else ())
    for line in parallel.explain().splitlines():  # not lost if the race is ended early
        if line.startswith("Compiled:"):
            say(f"{workload.name}, {name}: {line}")
    return TunedModel(name, variant.compress, parallel, step, parallel.trace, parallel.network)


def _contestants(
    workload: Workload, settings: Settings, ours: TunedModel, others: Sequence[TunedModel], more: MoreContestants
) -> list[Contestant]:
    """The contestants that ``settings.only`` admits, and always every DataParallel and the references."""
    trace, network = ours.trace, _network(ours, others)
    model, step = workload.build()
    plans = [plan for tuned in others if (plan := tuned.parallel.plan) is not None]
    asked = [
        *(tuned.contestant() for tuned in others),
        *more(model, step, trace, network, plans),
        *(sharded_contestants(workload, settings.sharded) if settings.sharded else ()),
    ]
    found = [
        *reference_contestants(model, step, workload.device),
        *ddp_contestants(model, step, trace, network, _on_nccl()),
        ours.contestant(),
        *asked,
        *planned_contestants(model, step, trace, network),
    ]
    always = {COMPUTE, BASELINE, OURS, *(contestant.name for contestant in asked)}
    wanted = settings.only or ("",)  # which is part of every name
    return [one for one in found if one.name in always or any(part in one.name for part in wanted)]


def _network(ours: TunedModel, others: Sequence[TunedModel]) -> Network:
    """The network as DataParallel measured and calibrated it, with the costs of compressed dense collectives."""
    network = ours.network
    for kind, found in [(tuned.compress, tuned.network) for tuned in others]:
        if isinstance(kind, str) and kind in EVERY_ELEMENT:  # any plan can use it
            curves, delays = {**network.curves, kind: found.curve(kind)}, {**network.delays, kind: found.delay_s(kind)}
            network = replace(network, curves=curves, delays=delays, model=None)
    return network


def _on_nccl() -> bool:
    return "nccl" in dist.get_backend()
