"""Exchanges of buckets that were made elsewhere, all by one kind: DDP's own (comm hooks) or FSDP2's units."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.autograd import Variable

from anabranch.exchange.collectives import Collectives
from anabranch.exchange.compression import Settings, collectives_for, described, kinds_of
from anabranch.exchange.interface import Group, Scaler, Steps, record_stream
from anabranch.exchange.lanes import Lane
from anabranch.exchange.residuals.store import NO_PARAMETERS
from anabranch.values.kinds.names import DENSE, two_level
from anabranch.values.nodes import Nodes
from anabranch.values.plan import Bucket, Plan


def only_kind(settings: Settings) -> str | None:
    """The one kind that these settings name; None if a planner would have to choose."""
    kinds = kinds_of(settings)
    return None if len(kinds) > 1 else kinds[0] if kinds else DENSE


class ExternalBuckets:
    """The exchanges of one model, and what they keep between steps.

    settings   name one kind (``only_kind``)
    trained    what is averaged, by name: tensors of the sizes and dtypes that buckets have
    group      of the ranks among which they are averaged
    skipped    as in ``Residuals``
    """

    def __init__(
        self,
        settings: Settings,
        trained: Mapping[str, torch.Tensor],
        group: Group,
        frozen: Mapping[str, torch.Tensor] = NO_PARAMETERS,
        skipped: Callable[[], bool] | None = None,
    ) -> None:
        kind = only_kind(settings)
        assert kind is not None
        self.kind = kind
        self._settings = settings
        self._numels = {name: tensor.numel() for name, tensor in trained.items()}
        self._ranks = group.size()
        self.collectives: Collectives = collectives_for(
            settings, trained, group, lambda: True, frozen=frozen, skipped=skipped
        )
        self._excluded = self.collectives.excluded.get(kind, frozenset())
        self._await_buckets()
        self._steps_done = 0
        self.in_step = False  # from the first exchange of a backward to its end
        # Weak: a backward that fails drops its callbacks, and must not be waited for.
        self._ending: weakref.ref[Callable[[], None]] | None = None

    def use_nodes(self, nodes: Nodes, rank: int) -> None:
        """Exchange on two levels; before the first exchange. ``rank``: this one, in the group."""
        self.collectives.use_nodes(nodes, rank)
        self.kind = two_level(self.kind)
        self._await_buckets()

    def _await_buckets(self) -> None:
        """Residuals that are loaded wait for the buckets of their parameters."""
        compressed = tuple(name for name in self._numels if name not in self._excluded)
        if compressed and self.kind != DENSE:
            self.collectives.residuals.use_plan(Plan((Bucket(compressed, 0, self.kind),)))

    def agreed(self) -> list[str]:
        """Lines that must be the same on all ranks."""
        return [described(self._settings), *self.collectives.residuals.loaded()]

    def kind_of(self, dtype: torch.dtype) -> str:
        """The kind by which a bucket of this dtype travels in this step."""
        warm = self._steps_done >= self.collectives.residuals.warmup_steps
        return self.kind if warm and self.collectives.supports(self.kind, dtype) else DENSE

    def stages(self, names: Sequence[str], buffer: torch.Tensor, lane: Lane, scaler: Scaler | None) -> Sequence[Steps]:
        """The exchange of a bucket, for a message on this lane: ``names`` one after another in ``buffer``.

        Call it inside backward, and ``end_with_this_backward`` in the one that ends the step.
        """
        self.begin_step(scaler)
        parts = self._parts(names, buffer.dtype)
        if len(parts) == 1:
            return self._exchange(parts[0], buffer, lane)
        pieces = dict(zip(names, buffer.split([self._numels[name] for name in names]), strict=True))
        gathered = [torch.cat([pieces[name] for name in part.names]) for part in parts]
        exchanges = [self._exchange(part, tensor, lane) for part, tensor in zip(parts, gathered, strict=True)]

        def copied_back() -> Steps:
            for part, tensor in zip(parts, gathered, strict=True):
                averages = tensor.split([self._numels[name] for name in part.names])
                for name, average in zip(part.names, averages, strict=True):
                    pieces[name].copy_(average)
            yield from ()

        def kept() -> Steps:
            record_stream(*gathered)
            yield from ()

        # A part of one stage is sent when the others are exchanged between nodes.
        if any(len(exchange) > 1 for exchange in exchanges):
            exchanges = [one if len(one) > 1 else [iter(()), *one, iter(())] for one in exchanges]
        *stages, last = (chain(kept(), *stage) for stage in zip(*exchanges, strict=True))
        return [*stages, chain(last, copied_back())]

    def _exchange(self, part: Bucket, buffer: torch.Tensor, lane: Lane) -> Sequence[Steps]:
        numels = [self._numels[name] for name in part.names]
        return self.collectives.stages(part, buffer, numels, lane, self._ranks)

    def sent_nbytes(self, names: Sequence[str], dtype: torch.dtype) -> int:
        """Bytes that this rank sent in the last exchange of this bucket, as far as they are known."""
        sent = 0
        for part in self._parts(names, dtype):
            numel = sum(self._numels[name] for name in part.names)
            traffic = self.collectives.traffic(part, numel, dtype, self._ranks)
            sent += 0 if traffic is None else traffic.sent_nbytes
        return sent

    def state_dict(self) -> dict[str, Any]:
        """This rank's state; {} if nothing is kept between steps."""
        state = self.collectives.residuals.state_dict()
        return {**state, "steps_trained": self._steps_done} if state else {}

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Load the state of this rank, or those of all ranks; before the first step."""
        self.collectives.residuals.load_state_dict(*states)
        self._steps_done = max((state.get("steps_trained", 0) for state in states), default=0)

    def close(self) -> None:
        """Free what was kept between steps."""
        self.collectives.close()

    def _parts(self, names: Sequence[str], dtype: torch.dtype) -> list[Bucket]:
        """The bucket, or two: what must not travel by this kind travels dense."""
        kind = self.kind_of(dtype)
        whole = tuple(name for name in names if kind != DENSE and name in self._excluded)
        rest = tuple(name for name in names if name not in whole)
        return [Bucket(part, 0, by) for part, by in ((rest, kind), (whole, DENSE)) if part]

    def begin_step(self, scaler: Scaler | None) -> None:
        """Call it inside backward before an exchange; ``stages`` does so itself. Only the first of a step matters."""
        if self.in_step:
            return
        self.in_step = True
        if scaler is not None:
            self.collectives.residuals.rescale(float(scaler.get_scale()))

    def end_with_this_backward(self) -> None:
        """Call it inside a backward: a step that has begun then, or begins in it, ends with it.

        A re-entrant checkpoint runs a backward inside backward, and not each of them is a step.
        """
        if self._ending is not None and self._ending() is not None:
            return
        # Callbacks run in order when backward ends. One queued by a callback runs after those that average.
        queue = Variable._execution_engine.queue_callback

        def ending() -> None:
            queue(self._step_over)

        self._ending = weakref.ref(ending)
        queue(ending)

    def _step_over(self) -> None:
        self._ending = None
        if not self.in_step:  # no gradients were exchanged
            return
        self.in_step = False
        self._steps_done += 1
        self.collectives.residuals.on_step_end()
