"""Ranks in one process that train with plans of flat and two-level buckets, on the real residuals and exchanges.

Sums inside nodes are added here, by hand, and every rank gets the averages of all shares.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from benchmarks.virtual import VirtualWorld
from torch import nn

from anabranch import Bucket, Plan
from anabranch.exchange.communicator import Communicator
from anabranch.exchange.interface import Group, Steps
from anabranch.exchange.quantised.exchange import exchange as quantised_exchange
from anabranch.exchange.residuals.store import Residuals
from anabranch.exchange.shares import Share
from anabranch.exchange.sparse.oktopk import exchange as sparse_exchange
from anabranch.values.kinds.formats import FORMATS
from anabranch.values.kinds.names import between_nodes, density_of, is_dense, is_two_level
from anabranch.values.kinds.options import OkTopk
from anabranch.values.nodes import Nodes

SIZES = {"scalar": 1, "odd": 7, "matrix": 60, "rows": 33}  # of four ranks' shares two of a scalar are empty
OPTIONS = OkTopk(warmup_steps=0, region_period=3)

Gradients = list[dict[str, torch.Tensor]]  # of every rank, by name


class VirtualGroup:
    """What ``Residuals`` asks of a process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = (lambda: rank), (lambda: size)


def keeps(kind: str) -> bool:
    return between_nodes(kind) == "int4" or density_of(kind) is not None


def gradients(ranks: int, seed: int) -> Gradients:
    chance = torch.Generator().manual_seed(seed)
    return [{name: torch.randn(size, generator=chance) for name, size in SIZES.items()} for _ in range(ranks)]


class VirtualRanks:
    """All ranks of a training; ``settings`` are those of ``Residuals``."""

    def __init__(self, size: int, nodes: Nodes | None = None, **settings: Any) -> None:
        self.nodes = nodes
        self.parameters = [{name: nn.Parameter(torch.ones(n)) for name, n in SIZES.items()} for _ in range(size)]
        self._averaged = False
        self.residuals = [
            Residuals(
                keeps, mine, cast(Group, VirtualGroup(rank, size)), lambda: self._averaged, nodes=nodes, **settings
            )
            for rank, mine in enumerate(self.parameters)
        ]

    def use_plan(self, plan: Plan) -> None:
        for one in self.residuals:
            one.use_plan(plan)

    def step(self, plan: Plan, made: Gradients) -> dict[str, torch.Tensor]:
        """One step of all ranks; returns the averages, which all ranks have. Parameters may be unused."""
        self._averaged = False
        for mine, given in zip(self.parameters, made, strict=True):
            for parameter in mine.values():
                parameter.grad = None
            torch.stack([(mine[name] * gradient).sum() for name, gradient in given.items()]).sum().backward()
        for bucket in plan.buckets:
            self._exchange(bucket)
        self._averaged = True
        for one in self.residuals:
            one._flush._check()  # as the end of backward does
            one.on_step_end()
        averages = [{name: self._gradient(mine, name) for name in SIZES} for mine in self.parameters]
        assert all(
            torch.equal(other[name].view(torch.int32), averages[0][name].view(torch.int32))
            for other in averages
            for name in SIZES
        )
        return averages[0]

    def waiting(self) -> dict[str, torch.Tensor]:
        """What all ranks together have still to send, by parameter, from what they would save."""
        return waiting([one.state_dict() for one in self.residuals])

    @staticmethod
    def _gradient(mine: Mapping[str, nn.Parameter], name: str) -> torch.Tensor:
        grad = mine[name].grad
        return torch.zeros(SIZES[name]) if grad is None else grad

    def _exchange(self, bucket: Bucket) -> None:
        two_level = is_two_level(bucket.collective)
        assert self.nodes is not None or not two_level
        everyone = range(len(self.parameters))
        summed = self.nodes.ranks if self.nodes is not None and two_level else [[rank] for rank in everyone]
        parts = len(summed[0])
        averages = {name: torch.empty(SIZES[name]) for name in bucket.names}
        for number in range(parts):
            share = Share(parts, number)
            buffers = [
                torch.cat([
                    torch.stack([self._gradient(self.parameters[rank], name) for rank in node]).sum(0)[
                        slice(share.of(SIZES[name]).start, share.of(SIZES[name]).stop)
                    ]
                    for name in bucket.names
                ])
                for node in summed
            ]  # fmt: skip
            world = VirtualWorld(len(summed))
            world.run([
                self._steps(bucket, node[number], buffer, comm)
                for node, buffer, comm in zip(summed, buffers, world.comms, strict=True)
            ])  # fmt: skip
            pieces = buffers[0].split([len(share.of(SIZES[name])) for name in bucket.names])
            for name, piece in zip(bucket.names, pieces, strict=True):
                averages[name][share.of(SIZES[name]).start : share.of(SIZES[name]).stop] = piece
        for mine in self.parameters:
            for name, average in averages.items():
                mine[name].grad = average.clone()

    def _steps(self, bucket: Bucket, rank: int, buffer: torch.Tensor, comm: Communicator) -> Steps:
        kind, divisor, residuals = between_nodes(bucket.collective), float(len(self.parameters)), self.residuals[rank]
        if is_dense(kind):
            return self._dense(buffer, comm, divisor)
        state, velocity = residuals.bucket_state(bucket, buffer), residuals.velocity(bucket)
        assert len(state.boundaries) == comm.size + 1 and state.numel == len(buffer)
        if state.packed is not None:
            state.unpack(torch.empty(state.numel))
        density = density_of(kind)
        if density is None:
            state.step += 1
            steps = quantised_exchange(buffer, state.residual, comm, divisor, FORMATS[kind])
        else:
            steps = sparse_exchange(buffer, state, comm, divisor, density, OPTIONS, velocity)

        def exchanged() -> Steps:
            yield from steps
            if state.packed is not None:
                state.pack()

        return exchanged()

    @staticmethod
    def _dense(buffer: torch.Tensor, comm: Communicator, divisor: float) -> Steps:
        buffer.div_(divisor)
        yield comm.all_reduce(buffer, "dense")


def waiting(states: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The sum of all residuals in these states, by parameter; naively, an element at a time where it is a slice."""
    total = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
    for state in states:
        slices = state.get("slices", {}).get("residuals", {})
        for name, piece in state.get("residuals", {}).items():
            low, numel = slices.get(name, (0, len(piece)))
            assert numel == SIZES[name]
            for offset, value in enumerate(piece.tolist()):
                total[name][low + offset] += value
    return total
