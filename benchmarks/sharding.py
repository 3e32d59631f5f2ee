"""Steps of a model that FSDP2 shards over all ranks: planned units beside a unit per block, in turns; prints Markdown.

    anabranch lab --hosts 4 --rate 10gbit --backend nccl -- python -m benchmarks.sharding --model gpt2
    anabranch lab --hosts 4 --rate 25gbit --backend nccl -- python -m benchmarks.sharding --model resnet50

Every contestant trains its own copy of the model. A step is forward and backward; the time is that of the slowest rank.
Ratios are medians over rounds of the ratio to a unit per block in the same round. Predicted are steps of the recorded
model on the measured network, times what a unit per block took in the trial for each simulated second (so that its own
is that measurement); the record is of a unit per block alone. "MiB at most" is predicted, of gathered parameters,
gradients and buffers; "MiB of a step" is what a GPU's allocator had at most beyond what lies between steps, with
activations.
"""

import argparse
import os
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from benchmarks.fidelity_tasks import LENGTH, SYMBOLS, Transformer
from benchmarks.sharded import in_turns, leave, said
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import anabranch as ab
from anabranch.tools.bench.zoo import IMAGES, SEQUENCES, Loss, model_and_loss
from anabranch.tools.lab.rank_environment import LAB

MIB = 1 << 20
DDP, COMPUTING, PER_BLOCK = "DDP", "computing alone", "FSDP2, a unit per block"
OWN = "transformer"


def model_of(options: argparse.Namespace, device: torch.device) -> tuple[nn.Module, Loss]:
    """A model and its loss: of the zoo, or a transformer that needs no other package."""
    torch.manual_seed(0)
    if options.model != OWN:
        return model_and_loss(options.model, device, options.batch)
    model = Transformer(options.width, options.layers, 8, causal=True).to(device)
    text = torch.randint(SYMBOLS, (options.batch or 16, LENGTH + 1), device=device)

    def loss(wrapped: nn.Module) -> torch.Tensor:
        return cross_entropy(wrapped(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    return model, loss


def contestants_of(
    found: ab.FoundSharding, build: Callable[[], nn.Module], mesh: DeviceMesh
) -> tuple[dict[str, nn.Module], dict[str, ab.ShardingPlan]]:
    """Models to train, and the plans of those that are sharded; the planner's among them even if it lost its trial."""
    names = found.default.names
    plans = {
        PER_BLOCK: found.default,
        "FSDP2, a unit per block, kept after forward": ab.ShardingPlan.per_block(names, reshard=False),
        "FSDP2, one unit": ab.ShardingPlan.from_cuts(names, []),
        "planned": found.fastest,
    }
    distinct: dict[ab.ShardingPlan, str] = {}
    for name, plan in plans.items():
        distinct[plan] = f"{distinct[plan]} = {name}" if plan in distinct else name
    models = {name: ab.shard(build(), mesh, plan) for plan, name in distinct.items()}
    ddp = DistributedDataParallel(build(), gradient_as_bucket_view=True)
    return {COMPUTING: build(), DDP: ddp, **models}, {name: plan for plan, name in distinct.items()}


def options_of() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=(*IMAGES, *SEQUENCES, OWN), default=OWN)
    parser.add_argument("--batch", type=int, help="per rank; the default is that of `anabranch bench`")
    parser.add_argument("--half", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--memory-mib", type=int, help="for gathered parameters, gradients and buffers of a plan")
    parser.add_argument("--width", type=int, default=768, help=f"of {OWN}")
    parser.add_argument("--layers", type=int, default=12, help=f"of {OWN}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="of each contestant in a round")
    parser.add_argument("--trial-rounds", type=int, default=5, help="of find_sharding()")
    parser.add_argument("--limit-s", type=float, help="begin no round after so many seconds of training")
    parser.add_argument("--explain", action="store_true", help="where a step goes, by unit")
    return parser.parse_args()


def main() -> None:
    """Record, plan, train in turns, and print a table on rank 0."""
    options, kind = options_of(), "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    mesh, device = init_device_mesh(kind, (dist.get_world_size(),)), torch.device(kind)
    _, loss = model_of(options, device)

    def build() -> nn.Module:
        return model_of(options, device)[0]

    def step(model: nn.Module) -> None:
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=options.half):
            value = loss(model)
        value.backward()
        model.zero_grad()

    memory_nbytes = None if options.memory_mib is None else options.memory_mib * MIB
    found = ab.find_sharding(build, mesh, step, memory_nbytes=memory_nbytes, rounds=options.trial_rounds)
    said(found.explain())
    models, plans = contestants_of(found, build, mesh)
    steps = {name: partial(step, model) for name, model in models.items()}
    rounds = in_turns(steps, options, kind)
    used = {name: step_nbytes(one) for name, one in steps.items()} if kind == "cuda" else {}
    explained = [explanation(name, models[name], steps[name], found) for name in plans] if options.explain else []
    if dist.get_rank() == 0:
        report(options, found, rounds, plans, used)
        print("\n".join(explained), flush=True)
    leave()


def explanation(name: str, model: nn.Module, step: Callable[[], None], found: ab.FoundSharding) -> str:
    """Where a step of this contestant goes."""
    watch = ab.watch(model)
    for _ in range(6):
        step()
    text = watch.explain(found.links)
    watch.close()
    return f"\n## {name}\n\n```text\n{text}\n```"


def step_nbytes(step: Callable[[], None]) -> int:
    """What a step allocates at most on this rank, beside what lies between steps: activations, too."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def report(
    options: argparse.Namespace,
    found: ab.FoundSharding,
    rounds: list[dict[str, float]],
    plans: dict[str, ab.ShardingPlan],
    used: dict[str, int],
) -> None:
    """The table."""
    processor = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores, {platform.machine()}"
    )
    precision = "bfloat16 autocast" if options.half else "float32"
    print(f"# Units of FSDP2: {options.model}, {found.trace.nbytes / MIB:.0f} MiB of parameters\n")
    print(f"{datetime.now(UTC).date()}, {processor}, torch {torch.__version__}, {os.environ.get(LAB, 'no lab')}, "
          f"{dist.get_world_size()} ranks, {precision};")  # fmt: skip
    print(f"{len(rounds)} rounds of {options.steps} steps each, in turns.\n\n{found.explain()}\n")
    columns = ("units", "freed", "ahead", "MiB at most", "MiB of a step", "ms per step", "from – to", "predicted",
               "a unit per block / it")  # fmt: skip
    print(f"| | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    per_block = next(name for name in plans if name.startswith(PER_BLOCK))
    for name in rounds[0]:
        took = [one[name] for one in rounds]
        ratio = median(one[per_block] / one[name] for one in rounds)
        figures, predicted = " | | | ", ""
        if name in plans:
            plan = plans[name]
            freed = sum(unit.reshard for unit in plan.units)
            figures = f"{len(plan)} | {freed} | {plan.prefetch} | {ab.sharded.peak_nbytes(found.trace, plan) / MIB:.0f}"
            predicted_ms = found.predicted_s(plan) * 1e3
            predicted = f"{predicted_ms:.1f} ({predicted_ms / median(took) - 1:+.0%})"
        span = f"{min(took):.1f} – {max(took):.1f}"
        mib = f"{used[name] / MIB:.0f}" if used else ""
        print(f"| {name} | {figures} | {mib} | {median(took):.1f} | {span} | {predicted} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
