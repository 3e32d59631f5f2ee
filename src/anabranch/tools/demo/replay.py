"""DDP beside the plan for a model that just about keeps the links busy: a trace replayed, so that any machine can."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from anabranch import planning as planners
from anabranch.observe.measure import measure
from anabranch.parallel import DataParallel
from anabranch.tools.bench.contestants import DDP_OPTIONS, PLAN_WARMUP_STEPS, Contestant, reference_contestants
from anabranch.tools.bench.race import RaceSettings, race_all
from anabranch.tools.bench.workload import replay_workload
from anabranch.tools.report.documents import BASELINE, OURS, Benchmark
from anabranch.tuning.candidates import predicted_s
from anabranch.values.files import load_bundled_trace
from anabranch.values.plan import Plan

# A plan that sends everything gains most where the network takes about as long as backward. At the demo's fast links
# that is so for GoogLeNet as recorded on an H200, ten times slower.
NAME, SLOWER = "googlenet", 10.0
RACE = RaceSettings(iters=7, batches=1, warmup=1)
MEASURE_S = 2.0


def replay() -> Benchmark:
    """Steps of DDP and of DataParallel with the exact plan, in turns, beside the predictions. Collective."""
    recorded, device = load_bundled_trace(NAME), torch.device("cpu")
    work, trace = replay_workload(NAME, recorded, SLOWER), recorded.scaled(SLOWER)
    group = dist.group.WORLD
    assert group is not None
    network = measure([group], device, trace.nbytes, MEASURE_S)
    plan = planners.optimal(trace, network)
    compute_only, *_ = reference_contestants(*work.build(), device)
    model, ddp_step = work.build()
    ddp = DistributedDataParallel(model, **DDP_OPTIONS)
    model, our_step = work.build()
    ours = DataParallel(model, plan=plan, profile_steps=0, cache=False, **DDP_OPTIONS)
    for _ in range(PLAN_WARMUP_STEPS):
        ddp_step(ddp)
        our_step(ours)

    def contestant(name: str, step: partial[None], its_plan: Plan) -> Contestant:
        return Contestant(name, lambda: nullcontext(step), its_plan, predicted_s(trace, its_plan, network), RACE.warmup)

    contestants = [
        replace(compute_only, warmup=RACE.warmup),
        contestant(BASELINE, partial(ddp_step, ddp), planners.by_bytes(trace, network)),
        contestant(OURS, partial(our_step, ours), plan),
    ]
    benchmark = race_all(work, RACE, contestants, trace, lambda _: None)
    benchmark = replace(benchmark, explanation=ours.explain())
    ours.close()
    return benchmark
