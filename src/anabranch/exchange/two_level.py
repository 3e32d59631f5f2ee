"""The two-level exchange of a bucket: dense inside each node, and any kind between nodes.

    scatter   the rank of place i gets the sum, over its node, of its share of the bucket
    between   the ranks of place i exchange that share: one of each node
    gather    inside each node all ranks get the averages of all shares

A share is a slice of every parameter: of n elements on R ranks per node, those from i n / R to (i + 1) n / R. So it
does not change with the plan, and of a bucket with many layers every rank has some of each.

Sums inside nodes are in float32, or float64, and in the order of ranks. All ranks of a node gather the same bytes, and
the ranks of a place end with the same bits, so all ranks do. The scatter is an all-to-all, since Gloo has no
reduce-scatter that sends as little, and NCCL's adds 16-bit numbers in 16 bits.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch

from anabranch.exchange.communicator import Communicator, Communicators
from anabranch.exchange.interface import DTYPES, Collective, Group, Steps, record_stream
from anabranch.exchange.lanes import NodeGroups
from anabranch.exchange.shares import Share
from anabranch.values.kinds.names import two_level

SCATTER, GATHER = INSIDE = ("scatter", "gather")  # the stages inside a node, as measurements name them


class Division(NamedTuple):
    """The slices of a bucket's parameters. Memory has them by parameter, and messages inside the node by place.

    by_parameter   elements of each slice, a parameter's slices one after another
    by_place       the same, a place's slices one after another
    shares         elements of each place's share
    """

    by_parameter: tuple[int, ...]
    by_place: tuple[int, ...]
    shares: tuple[int, ...]

    def to_places(self, buffer: torch.Tensor) -> torch.Tensor:
        """A copy of a bucket, place by place."""
        parameters, places = len(self.by_parameter) // len(self.shares), len(self.shares)
        slices = buffer.split(list(self.by_parameter))
        return torch.cat([slices[p * places + i] for i in range(places) for p in range(parameters)])

    def to_parameters(self, shares: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copy shares, a row for each place, to a bucket. Rows are as long as the longest share."""
        parameters, places = len(self.by_parameter) // len(self.shares), len(self.shares)
        sizes = self.by_place
        slices = [
            piece
            for i, row in enumerate(shares)
            for piece in row[: self.shares[i]].split(list(sizes[i * parameters : (i + 1) * parameters]))
        ]
        torch.cat([slices[i * parameters + p] for p in range(parameters) for i in range(places)], out=buffer)


@cache
def division(places: int, numels: tuple[int, ...]) -> Division:
    """The division of a bucket of parameters of these sizes."""
    sizes = [[len(Share(places, place).of(numel)) for numel in numels] for place in range(places)]
    by_parameter = tuple(sizes[place][p] for p in range(len(numels)) for place in range(places))
    return Division(by_parameter, tuple(size for row in sizes for size in row), tuple(map(sum, sizes)))


def stage_probes(between: Mapping[str, Collective], groups: NodeGroups) -> dict[str, Collective]:
    """Exchanges for timing by the bytes of a whole bucket: the stages inside nodes, and these kinds between nodes."""
    places = groups.scatter.size()
    scattering, gathering = Communicator(groups.scatter), Communicator(groups.gather)

    def shares(buffer: torch.Tensor) -> torch.Tensor:
        own = max(1, len(buffer) // places)
        return buffer[: own * places] if len(buffer) >= places else buffer.new_ones(places)

    def scatter(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:  # noqa: ARG001
        sent = shares(buffer)
        received = torch.empty_like(sent)
        yield scattering.all_to_all(received, sent, SCATTER)
        buffer[: len(sent) // places] = received.view(places, -1).mean(0)

    def gather(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:  # noqa: ARG001
        given = shares(buffer)
        gathered = torch.empty_like(given).view(places, -1)
        yield gathering.all_gather(gathered, given.view(places, -1)[:1], GATHER)
        buffer[: len(given)] = gathered.view(-1)[: len(buffer)]

    def of(exchange: Collective) -> Collective:
        def of_a_share(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:  # noqa: ARG001
            # Not by ``divisor``: of ones that are averaged again and again by it, slow denormal numbers would be left.
            return exchange(buffer[: max(1, len(buffer) // places)], groups.between, groups.between.size())

        return of_a_share

    return {SCATTER: scatter, GATHER: gather, **{two_level(kind): of(one) for kind, one in between.items()}}


def supports(dtype: torch.dtype) -> bool:
    """Whether gradients of this dtype may be averaged on two levels."""
    return dtype in (*DTYPES, torch.float64)


class TwoLevelExchange:
    """The stages of one bucket's exchange in one step.

    numels    elements of the bucket's parameters, which ``buffer`` has one after another
    divisor   of the sum over all ranks
    exact     the share is averaged in the gradients' own dtype. Else it is float32, and the exchange rounds it.

    ``share`` and ``divisor`` are what the exchange between nodes, among ``group``, has to average and to divide by.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        numels: Sequence[int],
        own: Share,
        groups: NodeGroups,
        comms: Communicators,
        divisor: float,
        exact: bool,
    ) -> None:
        self.group = groups.between
        self._buffer = buffer.view(-1)
        self._division = division(own.parts, tuple(numels))
        self._scattered, self._gathered = comms[groups.scatter], comms[groups.gather]
        self._wide = torch.float64 if buffer.dtype == torch.float64 else torch.float32
        # Exact sums are divided before they are rounded: one of 16-bit numbers may not fit into 16 bits.
        self._divides_first, self._divisor = exact, divisor
        self.divisor = 1.0 if exact else divisor
        dtype = buffer.dtype if exact else self._wide
        self.share = torch.empty(self._division.shares[own.number], dtype=dtype, device=buffer.device)

    def stages(self, between: Steps) -> tuple[Steps, Steps, Steps]:
        """All stages, with this exchange between nodes."""
        return self._scatter(), between if len(self.share) else iter(()), self._gather()

    def limited(self, residual: torch.Tensor | None) -> Steps:
        """Limit averages to what the gradients' dtype can hold, behind their exchange; it sends nothing.

        float16 cannot hold all of float32. An infinite average would be lost, or, put back, be infinite in every step
        to come. So what is beyond goes to the residual of one node, if there is one, and is sent in a later step.
        """
        largest = torch.finfo(self._buffer.dtype).max
        fitting = self.share.clamp(-largest, largest)
        if residual is not None and self.group.rank() == 0:
            residual.add_(torch.where(self.share.isfinite(), self.share - fitting, 0.0), alpha=self.divisor)
        self.share.copy_(fitting)
        yield from ()

    def _scatter(self) -> Steps:
        shares, own = self._division.shares, len(self.share)
        record_stream(self._buffer, self.share)
        one_parameter = len(self._division.by_parameter) == len(shares)  # its slices are in the order of places
        sent = self._buffer if one_parameter else self._division.to_places(self._buffer)
        received = sent.new_empty(len(shares), own)
        counts = None if len(set(shares)) == 1 else shares  # equal parts may travel by a faster way
        outputs = None if counts is None else [own] * len(shares)
        yield self._scattered.all_to_all(received.view(-1), sent, SCATTER, outputs, counts)
        if self._divides_first:
            torch.div(received.sum(0, dtype=self._wide), self._divisor, out=self.share)
        else:
            torch.sum(received, 0, dtype=self._wide, out=self.share)

    def _gather(self) -> Steps:
        shares, longest = self._division.shares, max(self._division.shares)
        record_stream(self._buffer, self.share)
        part = self.share.to(self._buffer.dtype)
        if len(part) < longest:
            part = torch.nn.functional.pad(part, (0, longest - len(part)))
        gathered = self._buffer.new_empty(len(shares), longest)
        yield self._gathered.all_gather(gathered, part[None], GATHER)
        self._division.to_parameters(gathered, self._buffer)
