"""Published sparse exchanges raced against DDP and Ok-Topk, on the same lanes and in the same buckets.

    anabranch lab --hosts 4 --rate 1gbit -- python -m benchmarks.rivals --trace resnet50 --compress oktopk:0.01 \\
        --rival topk:0.01 --rival gtopk:0.01 --report rivals.md

A rival is one of ``rival_exchanges`` and the share of the elements that it selects. Rank 0 prints a Markdown report, or
writes it to --report.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from benchmarks.rival_exchanges import RIVALS
from torch import nn

from anabranch import planning as planners
from anabranch.exchange.collectives import Collectives
from anabranch.exchange.communicator import Communicator
from anabranch.exchange.dense import DenseExchanges, dense
from anabranch.exchange.interface import Collective, ExchangeFamily, Group, Steps, Traffic
from anabranch.exchange.residuals.bucket_states import BucketStates
from anabranch.parallel import DataParallel
from anabranch.tools.bench.benchmark import Settings, run_benchmark
from anabranch.tools.bench.contestants import DDP_OPTIONS, PLAN_WARMUP_STEPS, Contestant
from anabranch.tools.bench.workload import Workload, replay_workload, zoo_workload
from anabranch.tools.bench.zoo import Step
from anabranch.tools.cli import arguments
from anabranch.tools.cli.output import say
from anabranch.tools.cli.ranks import join
from anabranch.tools.report.benchmark import markdown
from anabranch.values.kinds.names import OKTOPK, density_of
from anabranch.values.network import Network
from anabranch.values.plan import Bucket, Plan
from anabranch.values.trace import Trace

NAMES = [name for name in RIVALS if name != "dense"]


class Rival(NamedTuple):
    """An exchange of ``rival_exchanges`` by name, and the share of the elements that it selects."""

    name: str
    density: float

    @classmethod
    def named(cls, text: str) -> "Rival":
        """What "gtopk:0.01" means."""
        name, _, share = text.partition(":")
        if name not in NAMES:
            raise ValueError(f"--rival is {text!r}: expected {', '.join(f'{one}:0.01' for one in NAMES)}")
        if (density := density_of(f"{OKTOPK}:{share}")) is None:
            raise ValueError(f"--rival is {text!r}: expected a density in (0, 1], such as {name}:0.01")
        return cls(name, density)


def main() -> None:
    """Race on the ranks that torchrun or the lab has started."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a model of torchvision or transformers, such as resnet50 or gpt2:4")
    parser.add_argument("--trace", help="replay this trace instead: a file or a bundled name")
    parser.add_argument("--rival", action="append", required=True, metavar="NAME:DENSITY", help="may be repeated")
    parser.add_argument("--compress", action="append", default=[], help="as of anabranch bench; may be repeated")
    parser.add_argument("--only", action="append", default=[], help="as of anabranch bench; may be repeated")
    parser.add_argument("--iters", type=int, default=10)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="nccl where there is a GPU")
    parser.add_argument("--report", type=Path)
    given = parser.parse_args()
    if bool(given.model) == bool(given.trace):
        parser.error("expected --model or --trace")
    asked = {text: Rival.named(text) for text in given.rival}
    device = join(given.backend, on_gpu=bool(given.model))
    workload = _workload(given.model, given.trace, device)
    settings = Settings(iters=given.iters, batches=given.batches, compress=given.compress, only=given.only)
    leads = dist.get_rank() == 0
    found = run_benchmark(workload, settings, say if leads else lambda _: None, partial(sparse_rivals, asked=asked))
    if leads:
        text = markdown("Rivals of Ok-Topk", [found])
        if given.report is None:
            print(text)
        else:
            given.report.write_text(text, encoding="utf-8")
    dist.destroy_process_group()


def _workload(model: str | None, trace: str | None, device: torch.device) -> Workload:
    if model is not None:
        return zoo_workload(model, device)
    assert trace is not None
    return replay_workload(Path(trace).stem, arguments.trace(trace))


class RivalExchanges(ExchangeFamily):
    """The family of one published exchange, with error feedback.

    Buckets that are not float32 are sent dense, because the exchanges need float32.
    """

    def __init__(self, kind: str, rival: Rival, parameters: Mapping[str, torch.Tensor]) -> None:
        self._kind = kind
        self._rival = rival
        self._numels = {name: parameter.numel() for name, parameter in parameters.items()}
        device = next(iter(parameters.values())).device
        self._state = BucketStates(dist.get_rank(), dist.get_world_size(), device)

    def handles(self, kind: str) -> bool:
        return kind == self._kind

    def supports(self, kind: str, dtype: torch.dtype) -> bool:  # noqa: ARG002 - what is not float32 goes dense
        return kind == self._kind

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        if buffer.dtype != torch.float32:
            return dense(buffer, group, divisor)
        state = self._state.bucket(bucket.names, [self._numels[name] for name in bucket.names])
        return RIVALS[self._rival.name](buffer, state, Communicator(group), divisor, self._rival.density)

    def traffic(self, bucket: Bucket, numel: int, dtype: torch.dtype, ranks: int) -> Traffic | None:  # noqa: ARG002
        return None  # it is counted on the wire

    def probe(self, kind: str) -> Collective:
        raise NotImplementedError(f"{kind} is not planned with, so it is not timed by itself")


class RivalParallel(DataParallel):
    """A DataParallel that runs the given plan with the given collectives."""

    def __init__(self, module: nn.Module, plan: Plan, collectives: Collectives) -> None:
        self._given_collectives = collectives  # DataParallel.__init__ asks for it, so it comes first
        super().__init__(module, plan=plan, profile_steps=0, **DDP_OPTIONS)

    def _make_collectives(self, compress: Any) -> Collectives:  # noqa: ARG002
        return self._given_collectives


def sparse_rivals(
    model: nn.Module,
    step: Step,
    trace: Trace,
    network: Network,
    plans: Sequence[Plan],
    *,
    asked: Mapping[str, Rival],
) -> list[Contestant]:
    """One contestant for each rival in ``asked``, whose keys are the --rival arguments.

    They send the sparse buckets of the first of ``plans`` that has any. If none has, they send everything, in DDP's own
    buckets.
    """
    sparse = [plan for plan in plans if any(_sparse(bucket) for bucket in plan.buckets)]
    found = []
    for kind, rival in asked.items():
        plan = _sent_by(kind, sparse[0]) if sparse else planners.using(planners.by_bytes(trace, network), kind)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # One for all turns of the contestant, so that residuals are kept between them, as in one DataParallel.
        collectives = Collectives(RivalExchanges(kind, rival, parameters), DenseExchanges())
        found.append(Contestant(kind, partial(_raced, model, step, plan, collectives), plan, warmup=PLAN_WARMUP_STEPS))
    return found


def _sparse(bucket: Bucket) -> bool:
    return density_of(bucket.collective) is not None


def _sent_by(kind: str, plan: Plan) -> Plan:
    """The same plan with the collective ``kind`` for its sparse buckets."""
    return Plan(tuple(replace(b, collective=kind) if _sparse(b) else b for b in plan.buckets))


@contextmanager
def _raced(model: nn.Module, step: Step, plan: Plan, collectives: Collectives) -> Iterator[Callable[[], None]]:
    wrapped = RivalParallel(model, plan, collectives)
    try:
        yield partial(step, wrapped)
    finally:
        wrapped.close()


if __name__ == "__main__":
    main()
