"""DataParallel under Lean: a wrapper of our own, since DDP's reducer keeps every gradient alive."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo

from anabranch.memory.layout import LeanLayout, trained
from anabranch.memory.options import Lean, check_lean
from anabranch.network import Network
from anabranch.plan import Plan
from anabranch.runtime.agree import check_same
from anabranch.runtime.collectives import Collectives, Plain
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
        parameters = _checked(trained(module))
        with torch.no_grad():
            self._from_rank_0([*module.parameters(), *module.buffers()])
        collectives = self._memory = self._collectives(compress, parameters)
        wishes = replace(wishes, kinds=tuple(collectives.kinds), dense_names=collectives.dense_names)
        wishes.check_fits(parameters, ranks, collectives)
        control = same_ranks(group, "gloo", "anabranch control")
        self._pilot = Pilot(self, wishes, control, collectives, LeanLayout)
        self._release = weakref.finalize(self, self._pilot.close)

    def _collectives(self, compress: str | OkTopk | None, parameters: dict[str, nn.Parameter]) -> Collectives:
        if not isinstance(compress, OkTopk):
            return Plain(compress)
        owner = weakref.ref(self)
        averaged = lambda: (own := owner()) is not None and own._averaging  # noqa: E731
        return SparseCollectives(compress, parameters, self.process_group, averaged)

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
        return self.layout.updates.skipped

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

    @_disable_dynamo
    def _before_forward(self, will_average: bool) -> None:
        if self._pilot is None:
            raise RuntimeError("this DataParallel was closed: wrap the module again")
        if torch.is_grad_enabled():
            self._follow_scale()
            self._pilot.before_forward(averaged=self._averaging)
        if will_average and self._broadcast_buffers:
            with torch.no_grad():
                self._from_rank_0(list(self.module.buffers()))

    @_disable_dynamo
    def _after_forward(self, output: Any) -> None:
        assert self._pilot is not None
        self._pilot.after_forward(output)

    def _from_rank_0(self, tensors: list[torch.Tensor]) -> None:
        if tensors and dist.get_world_size(self.process_group) > 1:
            dist._broadcast_coalesced(self.process_group, tensors, BROADCAST_NBYTES, 0)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Release hooks, groups and threads; the module can be wrapped again. The wrapper cannot be used afterwards."""
        if self._pilot is not None:
            self._release()
        self._let_go()


def _checked(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Refuse what the engine cannot run."""
    if not parameters:
        raise ValueError("no parameter of this module requires a gradient: nothing to train")
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        raise ValueError(f"the parameters are on {', '.join(map(str, devices))}: Lean trains models on one device")
    return parameters
