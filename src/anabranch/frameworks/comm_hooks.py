"""Compressed exchanges as comm hooks of a stock DistributedDataParallel: ``ddp.register_comm_hook(state, hook)``.

DDP keeps its own buckets and nothing is planned. Exchanges run on a lane, as under DataParallel: on Gloo a thread with
a group of its own, so that nothing waits inside a future's callback, and on NCCL a stream.

No ``from __future__ import annotations`` here: DDP refuses hooks whose annotations are text.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from anabranch.exchange.agreement import check_same
from anabranch.exchange.compression import Settings, keeps_residuals, name_of, settings_of
from anabranch.exchange.external_buckets import ExternalBuckets, only_kind
from anabranch.exchange.groups import USE_A_TORCH_GROUP, default_group, no_clone_reason
from anabranch.exchange.interface import Scaler
from anabranch.exchange.lanes import Lanes, Message
from anabranch.exchange.nodes import GivenNodes, check_given, find_nodes
from anabranch.values.kinds.names import DENSE
from anabranch.values.kinds.options import OkTopk, Quantised


class CommHookState:
    """The state of ``oktopk_hook`` or ``quantised_hook`` for one model on one rank: its residuals.

    module: the model, wrapped or not; its parameters' names are in checkpoints. compress: "bf16", "int8", "int4",
    ``Quantised(...)`` or ``OkTopk(...)``. process_group: that of DDP, by default the group of all ranks. It need not
    exist yet: groups and threads are made in the first backward pass, on all ranks. nodes: as for DataParallel; where
    there are some, gradients are summed inside them first.
    """

    def __init__(
        self,
        module: nn.Module,
        compress: str | Quantised | OkTopk,
        process_group: dist.ProcessGroup | None = None,
        nodes: GivenNodes = "auto",
    ) -> None:
        check_given(nodes)
        settings = settings_of(compress)
        if not isinstance(settings, Quantised | OkTopk) or only_kind(settings) is None:
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
        self._module: nn.Module = module if ddp is None else ddp.module
        self._group = process_group
        self._nodes: GivenNodes = nodes
        self._started: tuple[ExternalBuckets, Lanes] | None = None
        self._scaler: Scaler | None = None
        self._names: dict[torch.Tensor, str] = {}

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank to save in a checkpoint with the model; {} if nothing is kept between steps."""
        exchanges, _ = self._start()
        return exchanges.state_dict()

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned on this rank, on every rank, before the first step.

        If the number of ranks has changed, give every rank the states of all old ranks.
        """
        exchanges, lanes = self._start()
        if len(lanes):
            raise RuntimeError("load_state_dict() of a comm hook's state after steps were made: load before the first")
        exchanges.load_state_dict(*states)

    def follow(self, scaler: Scaler) -> None:
        """Scale residuals with this GradScaler; call it on every rank."""
        self._scaler = scaler

    def close(self) -> None:
        """Release threads and groups; residuals are gone then, so save them before."""
        if self._started is not None:
            self._release()
            self._started = None

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of a bucket of DDP's; called by the hooks, in the same order on every rank."""
        exchanges, lanes = self._start()
        if not len(lanes):  # the first backward pass, where all ranks are
            lanes.grow(1)
            group = lanes[0].group
            check_same("the state of the comm hook", [*exchanges.agreed(), f"nodes {self._nodes}"], group)
            if (nodes := find_nodes(self._nodes, group).nodes) is not None:
                lanes.use_nodes(nodes, [0])
                exchanges.use_nodes(nodes, dist.get_rank(group))
        names = [self._names[parameter] for parameter in bucket.parameters()]
        buffer = bucket.buffer()
        kind = exchanges.kind_of(buffer.dtype)
        label = f"the bucket to {names[-1]} ({len(names)} gradients, {kind})"
        stages = exchanges.stages(names, buffer, lanes[0], self._scaler)
        if bucket.is_last():  # the first may be ready in the backward of a re-entrant checkpoint, inside backward
            exchanges.end_with_this_backward()
        return lanes[0].submit(Message(stages, buffer, label, on_side_stream=kind != DENSE))

    def _start(self) -> tuple[ExternalBuckets, Lanes]:
        """The exchanges and their lane; made at the first use."""
        if self._started is None:
            group = self._group or default_group()
            if reason := no_clone_reason(group):
                raise ValueError(f"compress={name_of(self.settings)} cannot run here: {reason}. {USE_A_TORCH_GROUP}")
            self._names = {parameter: name for name, parameter in self._module.named_parameters()}
            trained = {name: parameter for parameter, name in self._names.items() if parameter.requires_grad}
            frozen = {name: parameter for parameter, name in self._names.items() if not parameter.requires_grad}
            exchanges = ExternalBuckets(self.settings, trained, group, frozen)
            lanes = Lanes(group, next(iter(trained.values())).device, exchanges.collectives.max_ctas)
            self._started = exchanges, lanes
            self._release = weakref.finalize(self, _close, exchanges, lanes)
        return self._started


def _close(exchanges: ExternalBuckets, lanes: Lanes) -> None:
    exchanges.close()
    lanes.close()


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
