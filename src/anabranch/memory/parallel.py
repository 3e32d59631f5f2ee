"""DataParallel under Lean: a wrapper of our own, since DDP's reducer keeps every gradient alive."""

import json
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo

from anabranch.memory.choose import Action
from anabranch.memory.layout import LeanLayout, trained
from anabranch.memory.mix import ManagedActivations
from anabranch.memory.options import Lean, check_lean
from anabranch.network import Network
from anabranch.plan import Plan
from anabranch.runtime.agree import check_same, from_rank_0
from anabranch.runtime.collectives import Collectives, Plain, Scaler
from anabranch.runtime.lanes import same_ranks
from anabranch.runtime.pilot import Pilot
from anabranch.runtime.steered import Steered
from anabranch.runtime.wishes import Planner, Wishes, model_described
from anabranch.sparse.collectives import SparseCollectives, check_compress
from anabranch.sparse.options import OkTopk

BROADCAST_NBYTES = 250 << 20  # in one message, as DDP does


class LeanParallel(Steered, nn.Module):
    """What ``DataParallel(module, memory=Lean(...))`` is: no gradient outlives its bucket's exchange.

    Every bucket is updated inside backward, by an optimizer of its own. ``optimizer`` stands for all of them: for
    learning-rate schedulers and checkpoints; its ``step()`` has nothing left to do.
    """

    static_graph = False

    def __init__(
        self,
        module: nn.Module,
        *,
        memory: Lean,
        compress: str | OkTopk | None = None,
        planner: str | Planner = "optimal",
        plan: Plan | None = None,
        network: Network | None = None,
        lanes: int | None = None,
        profile_steps: int = 10,
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        check_compress(compress)
        check_lean(memory)
        if isinstance(compress, OkTopk) and compress.momentum:
            raise ValueError(
                f"OkTopk momentum is {compress.momentum}, and under Lean gradients are added to what waits as they "
                "come: leave momentum to the optimizer"
            )
        group = process_group or dist.group.WORLD
        if group is None:
            raise RuntimeError("no process group: call torch.distributed.init_process_group() before DataParallel")
        ranks = dist.get_world_size(group)
        wishes = Wishes(planner, plan, network, lanes, profile_steps if ranks > 1 or plan is not None else 0)
        check_same("the model", model_described(module), group)
        asked = [*wishes.described(), f"compress {compress}", *memory.described()]
        check_same("the settings of DataParallel", asked, group)
        self.module, self.memory, self.process_group = module, memory, group
        self._broadcast_buffers, self._averaging = broadcast_buffers, True
        parameters = _checked(module)
        with torch.no_grad():
            self._from_rank_0([*_shared(module.named_parameters(), module), *_shared(module.named_buffers(), module)])
        collectives = self._memory = self._collectives(compress, parameters)
        wishes = replace(wishes, kinds=tuple(collectives.kinds), dense_names=collectives.dense_names)
        wishes.check_fits(parameters, ranks, collectives)
        self._activations = ManagedActivations(module, memory.activations, partial(_as_rank_0, group))
        self._undo = weakref.finalize(self, self._activations.undo)
        self._undo.atexit = False  # there is no one left to use the module
        control = same_ranks(group, "gloo", "anabranch control")
        self._pilot = Pilot(self, wishes, control, collectives, LeanLayout)
        self._release = weakref.finalize(self, self._pilot.close)

    def _collectives(self, compress: str | OkTopk | None, parameters: dict[str, nn.Parameter]) -> Collectives:
        if not isinstance(compress, OkTopk):
            return Plain(compress)
        owner = weakref.ref(self)
        averaged = lambda: (own := owner()) is not None and own._averaging  # noqa: E731

        def applied(names: Collection[str]) -> Collection[str]:
            own = owner()
            return own.layout.applied(names) if own is not None else ()

        return SparseCollectives(compress, parameters, self.process_group, averaged, applied)

    @property
    def layout(self) -> LeanLayout:
        """What runs the buckets."""
        if self._pilot is None:
            raise RuntimeError("this DataParallel was closed: wrap the module again")
        assert isinstance(self._pilot.live, LeanLayout)
        return self._pilot.live

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """All buckets' optimizers as one: for schedulers and checkpoints."""
        return self.layout.optimizers.shown

    @property
    def skipped(self) -> int:
        """Updates of buckets that were left out because a gradient was not finite on some rank."""
        return self.layout.updates.count()

    def explain(self) -> str:
        """See ``Steered``."""
        if self._pilot is not None:
            with suppress(RuntimeError):  # a lane has failed, and has said so where it was waited for
                self.layout.residuals.settle()
        return super().explain()

    def comm_state_dict(self) -> dict[str, Any]:
        """See ``Steered``."""
        if self._pilot is not None:
            self.layout.residuals.settle()  # it may be on its way to host memory
        return super().comm_state_dict()

    def averaging(self) -> bool:
        """Whether gradients are averaged now: not under no_sync()."""
        return self._averaging

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only add up gradients, where autograd puts them: they live until the next average."""
        before, self._averaging = self._averaging, False
        try:
            yield
        finally:
            self._averaging = before

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; its gradients will be averaged, and its parameters updated, in backward."""
        will_average = torch.is_grad_enabled() and self._averaging
        self._before_forward(will_average)
        output = self.module(*inputs, **kwargs)
        if will_average:
            self._after_forward(output)
        return output

    def follow(self, scaler: Scaler) -> None:
        """Let updates, and what waits to be sent, follow this GradScaler; call it on every rank, and once.

        ``scaler.scale(loss).backward()`` is all that is left to do: before the next forward the scale falls if an
        update was left out, and rises after its interval of steps without, by the scaler's own factors.
        ``scaler.step()`` and ``scaler.update()`` are for gradients that live until then: do not call them.
        """
        self._good_steps, self._seen = 0, self._so_far()
        super().follow(scaler)

    def _follow_scale(self) -> None:
        scaler = self._scaler
        if isinstance(scaler, torch.amp.GradScaler) and self._seen != (now := self._so_far()):
            (_, skipped), self._seen = self._seen, now
            self._good_steps = self._good_steps + 1 if skipped == now[1] else 0
            if self._good_steps == 0:
                scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
            elif self._good_steps == scaler.get_growth_interval():
                self._good_steps = 0
                scaler.update(scaler.get_scale() * scaler.get_growth_factor())
        if scaler is not None and self.layout.updates.scale != (scale := float(scaler.get_scale())):
            self.layout.updates.scale = scale
            self.layout.residuals.settle()
        super()._follow_scale()

    def _so_far(self) -> tuple[int, int]:
        """Steps made, and updates left out."""
        return (self._pilot.steps_done if self._pilot is not None else 0), self.skipped

    @_disable_dynamo
    def _before_forward(self, will_average: bool) -> None:
        if self._pilot is None:
            raise RuntimeError("this DataParallel was closed: wrap the module again")
        if torch.is_grad_enabled():
            if self._averaging:
                self._follow_scale()
            self._pilot.before_forward(averaged=self._averaging)
        if will_average and self._broadcast_buffers:
            with torch.no_grad():
                self._from_rank_0(_shared(self.module.named_buffers(), self.module))

    @_disable_dynamo
    def _after_forward(self, output: Any) -> None:
        assert self._pilot is not None
        self._pilot.after_forward(output)
        self.layout.after_forward(output)

    def _from_rank_0(self, tensors: list[torch.Tensor]) -> None:
        if tensors and dist.get_world_size(self.process_group) > 1:
            dist._broadcast_coalesced(self.process_group, tensors, BROADCAST_NBYTES, 0)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Release hooks, groups and threads; the module can be wrapped again. The wrapper cannot be used afterwards."""
        if self._pilot is not None:
            self._release()
            self._undo()
        self._let_go()


def _as_rank_0(group: dist.ProcessGroup, actions: dict[str, Action]) -> dict[str, Action]:
    """Rank 0's choice for activations: ranks must recompute alike where a block communicates."""
    chosen: dict[str, Action] = json.loads(from_rank_0(json.dumps(actions).encode(), group))
    return chosen


def _shared(named: Iterable[tuple[str, torch.Tensor]], module: nn.Module) -> list[torch.Tensor]:
    """Those that are the same on all ranks: DDP leaves some to each."""
    own_affair = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return [tensor for name, tensor in named if name not in own_affair]


def _checked(module: nn.Module) -> dict[str, nn.Parameter]:
    """What it trains; refuses what the engine cannot run."""
    parameters = trained(module)
    if not parameters:
        raise ValueError("no parameter of this module requires a gradient: nothing to train")
    sparse = [name for name, part in module.named_modules() if getattr(part, "sparse", False) is True]
    if sparse:
        raise ValueError(
            f"{sparse[0]} has sparse gradients, and Lean adds gradients up in place: make it with sparse=False"
        )
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        raise ValueError(f"the parameters are on {', '.join(map(str, devices))}: Lean trains models on one device")
    return parameters
