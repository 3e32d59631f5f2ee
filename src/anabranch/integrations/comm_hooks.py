"""Compressed exchanges as comm hooks of a stock DistributedDataParallel: ``ddp.register_comm_hook(state, hook)``.

DDP keeps its own buckets and nothing is planned. Exchanges run on a lane, as under DataParallel: on Gloo a thread with
a group of its own, so that nothing waits inside a future's callback, and on NCCL a stream.

No ``from __future__ import annotations`` here: DDP refuses hooks whose annotations are text.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from anabranch.comm.agree import check_same
from anabranch.comm.collectives import Collectives, Scaler
from anabranch.comm.exchange import Steps, record_stream
from anabranch.comm.groups import USE_A_TORCH_GROUP, default_group, no_clone_reason
from anabranch.comm.lanes import Lane, Lanes, Message
from anabranch.compression import Settings, collectives_for, described, keeps_residuals, kinds_of, name_of, settings_of
from anabranch.kinds import DENSE
from anabranch.plan import Bucket, Plan
from anabranch.quantised.options import Quantised
from anabranch.sparse.options import OkTopk


class CommHookState:
    """The state of ``oktopk_hook`` or ``quantised_hook`` for one model on one rank: its residuals.

    module: the model, wrapped or not; its parameters' names are in checkpoints. compress: "bf16", "int8", "int4",
    ``Quantised(...)`` or ``OkTopk(...)``. process_group: that of DDP, by default the group of all ranks. It need not
    exist yet: groups and threads are made in the first backward pass, on all ranks.
    """

    def __init__(
        self, module: nn.Module, compress: str | Quantised | OkTopk, process_group: dist.ProcessGroup | None = None
    ) -> None:
        settings = settings_of(compress)
        kinds = kinds_of(settings)
        if not isinstance(settings, Quantised | OkTopk) or len(kinds) != 1:
            raise ValueError(
                f"compress is {compress!r}: a comm hook sends every bucket by one kind: expected bf16, int8, int4, "
                "Quantised(...), or OkTopk(...) with one density; DataParallel can choose among several"
            )
        ddp = module if isinstance(module, DistributedDataParallel) else None
        if ddp is not None and ddp.find_unused_parameters and keeps_residuals(settings):
            raise ValueError(
                f"compress={name_of(settings)} with find_unused_parameters=True: DDP drops the averages of parameters "
                "that no rank used, and with them residuals that were sent: set find_unused_parameters=False"
            )
        self.settings: Settings = settings
        (self._kind,) = kinds
        self._module: nn.Module = module if ddp is None else ddp.module
        self._group = process_group
        self._running: _Running | None = None
        self._scaler: Scaler | None = None

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank to save in a checkpoint beside the model; {} if nothing is kept between steps."""
        return self._started().state_dict()

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned on this rank, on every rank, before the first step.

        If the number of ranks has changed, give every rank the states of all old ranks.
        """
        self._started().load_state_dict(*states)

    def follow(self, scaler: Scaler) -> None:
        """Scale residuals with this GradScaler; call it on every rank."""
        self._scaler = scaler

    def close(self) -> None:
        """Release threads and groups; residuals are gone then, so save them before."""
        if self._running is not None:
            self._release()
            self._running = None

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of a bucket of DDP's; called by the hooks, in the same order on every rank."""
        return self._started().exchange(bucket, self._scaler)

    def _started(self) -> "_Running":
        if self._running is None:
            self._running = _Running(self._module, self.settings, self._kind, self._group or default_group())
            self._release = weakref.finalize(self, self._running.close)
        return self._running


def oktopk_hook(state: CommHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A comm hook for DDP that sends the largest values of matrices and keeps the rest; vectors are sent whole."""
    _check_settings(state, OkTopk)
    return state.exchange(bucket)


def quantised_hook(state: CommHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A comm hook for DDP that rounds what is sent to 16, 8 or 4 bits; the sum is float32."""
    _check_settings(state, Quantised)
    return state.exchange(bucket)


def _check_settings(state: object, expected: type) -> None:
    settings = getattr(state, "settings", None)
    if not isinstance(settings, expected):
        found = f"CommHookState of {name_of(settings)}" if isinstance(state, CommHookState) else repr(state)
        raise ValueError(
            f"the state of this comm hook is a {found}: expected CommHookState(model, {expected.__name__}(...))"
        )


class _Running:
    """The exchanges of one model, from the first use on."""

    def __init__(self, module: nn.Module, settings: Settings, kind: str, group: dist.ProcessGroup) -> None:
        if reason := no_clone_reason(group):
            raise ValueError(f"compress={name_of(settings)} cannot run here: {reason}. {USE_A_TORCH_GROUP}")
        named = dict(module.named_parameters())
        trained = {name: p for name, p in named.items() if p.requires_grad}
        frozen = {name: p for name, p in named.items() if not p.requires_grad}
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in named.items()}
        self._numels = {name: parameter.numel() for name, parameter in named.items()}
        self._settings = settings
        self._kind = kind
        self._ranks = group.size()
        self._collectives: Collectives = collectives_for(settings, trained, group, lambda: True, frozen=frozen)
        sparse = tuple(name for name in trained if name not in self._collectives.excluded.get(kind, ()))
        if sparse:  # residuals that are loaded wait for their buckets
            self._collectives.use_plan(Plan((Bucket(sparse, 0, kind),)))
        self._lanes = Lanes(group, next(iter(trained.values())).device, self._collectives.max_ctas)
        self._steps_done = 0
        self._in_step = False

    def exchange(self, bucket: GradBucket, scaler: Scaler | None) -> torch.futures.Future[torch.Tensor]:
        lane = self._lane()
        if not self._in_step:
            self._in_step = True
            if scaler is not None:
                self._collectives.rescale(float(scaler.get_scale()))
            # Callbacks run in order when backward ends. One queued by a callback runs after DDP's, which averages.
            queue = Variable._execution_engine.queue_callback
            queue(lambda: queue(self._step_over))
        names = [self._names[parameter] for parameter in bucket.parameters()]
        buffer = bucket.buffer()
        warm = self._steps_done >= self._collectives.warmup_steps
        kind = self._kind if warm and self._collectives.supports(self._kind, buffer.dtype) else DENSE
        label = f"the bucket to {names[-1]} ({len(names)} gradients, {kind})"
        steps = self._steps(names, buffer, kind, lane)
        return lane.submit(Message(steps, buffer, label, on_side_stream=self._collectives.on_side_stream(kind)))

    def _steps(self, names: Sequence[str], buffer: torch.Tensor, kind: str, lane: Lane) -> Steps:
        """The exchange of a bucket. It begins now, also where its first message is sent later, by the lane."""
        excluded = self._collectives.excluded.get(kind, frozenset())
        whole = [name for name in names if name in excluded]
        if len(whole) in (0, len(names)):
            kind = DENSE if whole else kind
            return self._collectives.steps(Bucket(tuple(names), 0, kind), buffer, lane.group, self._ranks)
        pieces = dict(zip(names, buffer.split([self._numels[name] for name in names]), strict=True))
        parts = [([name for name in names if name not in excluded], kind), (whole, DENSE)]
        gathered = [torch.cat([pieces[name] for name in members]) for members, _ in parts]
        exchanges = [
            self._collectives.steps(Bucket(tuple(members), 0, by), part, lane.group, self._ranks)
            for (members, by), part in zip(parts, gathered, strict=True)
        ]

        def exchanged() -> Steps:
            record_stream(*gathered)
            for steps in exchanges:
                yield from steps
            for (members, _), part in zip(parts, gathered, strict=True):
                averages = part.split([self._numels[name] for name in members])
                for name, average in zip(members, averages, strict=True):
                    pieces[name].copy_(average)

        return exchanged()

    def state_dict(self) -> dict[str, Any]:
        state = self._collectives.state_dict()
        return {**state, "steps_trained": self._steps_done} if state else {}

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        if len(self._lanes):
            raise RuntimeError("load_state_dict() of a comm hook's state after steps were made: load before the first")
        self._collectives.load_state_dict(*states)
        self._steps_done = max((state.get("steps_trained", 0) for state in states), default=0)

    def close(self) -> None:
        self._collectives.close()
        self._lanes.close()

    def _lane(self) -> Lane:
        """The lane; made in the first backward pass, where all ranks are. Ranks compare what they were given then."""
        if not len(self._lanes):
            self._lanes.grow(1)
            lines = [described(self._settings), *self._collectives.loaded()]
            check_same("the state of the comm hook", lines, self._lanes[0].group)
        return self._lanes[0]

    def _step_over(self) -> None:
        self._in_step = False
        self._steps_done += 1
        self._collectives.on_step_end()
