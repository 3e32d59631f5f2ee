r"""Steps of a transformer that FSDP2 shards inside nodes: stock HSDP and ``ab.replicate`` in turns; prints Markdown.

    anabranch lab --hosts 2 --ranks-per-host 2 --rate 10gbit --backend nccl --inside memory -- \
        python -m benchmarks.sharded

Inside a host, messages pass its loopback, or with the lab's ``--inside memory`` they are copies in memory: slower and
faster than the links of a real node. FSDP2 with a shard on every rank, whose messages go around all hosts, passes
loopbacks in both.

Every contestant trains its own copy of the model. A step is forward, backward and an SGD update; the time is that of
the slowest rank. Ratios are medians over rounds of the ratio to HSDP in the same round.
"""

import argparse
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.fidelity_tasks import LENGTH, SYMBOLS, Transformer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import anabranch as ab
from anabranch.fsdp.find_sharding import measure_links
from anabranch.fsdp.mesh import over_mesh
from anabranch.tools.lab.rank_environment import LAB

HSDP, SHARDED, COMPUTING = "HSDP", "FSDP2, a shard on every rank", "nothing between nodes"
KEPT = "HSDP, kept after forward"
KINDS: dict[str, Any] = {
    "replicate": None,
    "replicate, bf16": "bf16",
    "replicate, int8": "int8",
    "replicate, int4": "int4",
    "replicate, Ok-Topk 1 %": ab.OkTopk(density=0.01, warmup_steps=0),
    "replicate, Ok-Topk 1 %, bf16": ab.OkTopk(density=0.01, warmup_steps=0, wire="bf16"),
}
EXPLAINED = (HSDP, "replicate, int8", "replicate, Ok-Topk 1 %")
WARM_UP = 3  # steps of each


def sharded(model: nn.Module, mesh: DeviceMesh, kept: bool) -> nn.Module:
    """A unit per block, and one for the rest; parameters that are kept after forward are not gathered in backward."""
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, reshard_after_forward=not kept)
    fully_shard(model, mesh=mesh)
    return model


def contestant(
    name: str, build: Callable[[], nn.Module], mesh: DeviceMesh, batch: int, keep: bool
) -> tuple[nn.Module, Callable[[], None]]:
    """A model, and a function that trains one step of it."""
    if name in (HSDP, KEPT):
        model = sharded(build(), mesh, kept=name == KEPT)
    elif name == SHARDED:
        model = sharded(build(), init_device_mesh(mesh.device_type, (dist.get_world_size(),)), keep)
    else:
        model = sharded(build(), mesh["shard"], keep)
    if name in KINDS:
        ab.replicate(model, mesh, compress=KINDS[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    text = torch.randint(SYMBOLS, (batch, LENGTH + 1), generator=generator).to(mesh.device_type)

    def step() -> None:
        logits = model(text[:, :-1])
        cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def timed(step: Callable[[], None], steps: int, device: str) -> float:
    """Milliseconds of a step on the slowest rank."""
    settle(device)
    begun = perf_counter()
    for _ in range(steps):
        step()
    settle(device)
    took = torch.tensor((perf_counter() - begun) / steps * 1e3, device=device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def in_turns(
    steps: Mapping[str, Callable[[], None]], options: argparse.Namespace, device: str
) -> list[dict[str, float]]:
    """Milliseconds of a step of each contestant, in each round; those after ``--limit-s`` are left out."""
    begun, rounds = perf_counter(), list[dict[str, float]]()
    for name, step in steps.items():
        took = timed(step, WARM_UP, device)
        said(f"{name}: {took:.1f} ms a step, the first {WARM_UP}")
    while len(rounds) < options.rounds and not (rounds and late(begun, options.limit_s, device)):
        rounds.append({name: timed(step, options.steps, device) for name, step in steps.items()})
        said(f"round {len(rounds)}: " + ", ".join(f"{name} {took:.1f}" for name, took in rounds[-1].items()))
    return rounds


def late(begun: float, limit_s: float | None, device: str) -> bool:
    """Whether so many seconds are over on any rank."""
    is_late = torch.tensor(limit_s is not None and perf_counter() - begun > limit_s, dtype=torch.int32, device=device)
    dist.all_reduce(is_late, op=dist.ReduceOp.MAX)
    return bool(is_late)


def said(text: str) -> None:
    """Progress, for whoever waits."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def settle(device: str) -> None:
    """All ranks begin together, and nothing is under way."""
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def leave() -> None:
    """End the process group, once Gloo's threads have let go of tensors: while Python ends, that would abort it."""
    sleep(0.2)
    dist.destroy_process_group()


def options_of() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16, help="passages of 128 bytes per rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of each contestant in a round")
    parser.add_argument("--limit-s", type=float, help="begin no round after so many seconds of training")
    parser.add_argument("--leave-out", choices=(COMPUTING, SHARDED, *KINDS), action="append", default=[])
    parser.add_argument(
        "--keep", action="store_true", help="all but HSDP keep parameters after forward; HSDP does both"
    )
    parser.add_argument("--predict", action="store_true", help="steps that are sent exactly, as simulated; takes 10 s")
    parser.add_argument("--explain", action="store_true", help="where a step goes, by unit")
    return parser.parse_args()


def explanation(name: str, model: nn.Module, step: Callable[[], None]) -> str:
    """Where a step of this contestant goes, on this rank."""
    watch = ab.watch(model)
    for _ in range(4):
        step()
    text = watch.explain()
    watch.close()
    return f"\n## {name}\n\n```text\n{text}\n```"


def predictions(contestants: Mapping[str, tuple[nn.Module, Callable[[], None]]], mesh: DeviceMesh) -> dict[str, float]:
    """Milliseconds of a step as simulated, of those that send exactly: from a record of HSDP and measured links."""
    model, step = contestants[HSDP]
    watch = ab.watch(model)
    for _ in range(5):
        step()
    trace = watch.trace()
    watch.close()
    trace = trace.with_times(over_mesh(trace.times, mesh, dist.ReduceOp.MAX))
    links = measure_links(mesh, torch.device(mesh.device_type), trace.nbytes)
    found = {}
    for name in (name for name in (COMPUTING, HSDP, KEPT, "replicate") if name in contestants):
        watch = ab.watch(contestants[name][0])
        on = replace(links, between=None) if name == COMPUTING else links
        found[name] = ab.sharded.step_s(trace, watch.plan, on) * 1e3
        watch.close()
    return found


def main() -> None:
    """Train in turns, and print a table on rank 0."""
    options, device = options_of(), "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    half = dist.get_world_size() // 2
    mesh = init_device_mesh(device, (2, half), mesh_dim_names=("replicate", "shard"))

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Transformer(options.width, options.layers, 8, causal=True).to(device)

    numel = sum(parameter.numel() for parameter in build().parameters())
    references = (COMPUTING, HSDP, *([KEPT] if options.keep else []), SHARDED)
    names = [name for name in (*references, *KINDS) if name not in options.leave_out]
    contestants = {name: contestant(name, build, mesh, options.batch, options.keep) for name in names}
    steps = {name: step for name, (_, step) in contestants.items()}
    rounds = in_turns(steps, options, device)
    predicted_ms = predictions(contestants, mesh) if options.predict else {}
    if dist.get_rank() == 0:
        processor = (
            torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} cores, {platform.machine()}"
        )
        print(f"# A sharded transformer of {numel / 1e6:.0f} million parameters\n")
        print(f"{datetime.now(UTC).date()}, {processor}, torch {torch.__version__}, {os.environ.get(LAB, 'no lab')},")
        print(f"batch {options.batch} × {LENGTH}; {len(rounds)} rounds of {options.steps} steps each, in turns."
              f"{' All but HSDP keep parameters after forward.' if options.keep else ''}\n")  # fmt: skip
        print("| | ms per step | from – to | predicted | HSDP / it |\n|---|---:|---:|---:|---:|")
        for name in steps:
            took = [one[name] for one in rounds]
            ratio = median(one[HSDP] / one[name] for one in rounds)
            ms = predicted_ms.get(name)
            predicted = "" if ms is None else f"{ms:.1f} ({ms / median(took) - 1:+.0%})"
            span = f"{min(took):.1f} – {max(took):.1f}"
            print(f"| {name} | {median(took):.1f} | {span} | {predicted} | {ratio:.2f} |", flush=True)
    if options.explain:
        for name in (name for name in EXPLAINED if name in contestants):
            text = explanation(name, *contestants[name])
            if dist.get_rank() == 0:
                print(text, flush=True)
    leave()


if __name__ == "__main__":
    main()
