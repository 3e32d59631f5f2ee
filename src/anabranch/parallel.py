"""DataParallel: a DistributedDataParallel that records, measures, plans, agrees, runs, explains and re-plans."""

import weakref
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from anabranch.comm.collectives import Collectives, DenseCollectives
from anabranch.ddp.reducer import reduced_parameters, unwrap
from anabranch.lean.options import Lean
from anabranch.lean_parallel import LeanDataParallel
from anabranch.network import Network
from anabranch.plan import Plan
from anabranch.sparse.collectives import SparseCollectives, check_compress
from anabranch.sparse.options import OkTopk
from anabranch.tuning.options import Planner, TuningOptions
from anabranch.tuning.tuned import CLOSED, Tuned

# Options of DDP under which its reducer does not run the buckets as we know them.
OWN_WAYS = ("mixed_precision", "delay_all_reduce_named_params", "param_to_hook_all_reduce")


class DataParallel(Tuned, DistributedDataParallel):
    """Drop-in for ``DistributedDataParallel``: all its arguments, and it is one.

    The first steps run DDP's own buckets and are recorded; then the network is measured (a few seconds), rank 0 plans,
    every rank lays its buckets out alike, and the plan is kept if live steps show, twice, that it is faster than DDP.
    If not, DDP's own buckets stay. When the step time drifts by more than 10 %, all of this happens again.

    planner: a name from ``anabranch.planners`` or a function (trace, network) -> Plan.
    plan: run this plan, whatever comes of it. network: use this instead of measuring.
    lanes: at most so many simultaneous messages; None tries two where the measurement says that they pay.
    compress: "bf16" sends bfloat16 and adds in float32, OkTopk(...) sends the largest values and keeps the rest for
    later steps; each only where that is faster. profile_steps: per trial; 0 never plans.
    memory: Lean(...) updates each bucket inside backward, so that no gradient lives long; it is no DDP then, but a
    ``LeanDataParallel``.
    """

    def __new__(cls, module: nn.Module | None = None, *args: Any, memory: Lean | None = None, **options: Any) -> Any:
        """One that DDP's reducer runs or, with ``memory``, one with an engine of its own."""
        if memory is None:
            return super().__new__(cls)
        return LeanDataParallel(module, *args, memory=memory, **options)  # type: ignore[arg-type]

    _alone = False  # one rank: gradients are already their own average
    _joining = False

    def __init__(
        self,
        module: nn.Module,
        *args: Any,
        planner: str | Planner = "optimal",
        plan: Plan | None = None,
        network: Network | None = None,
        lanes: int | None = None,
        compress: str | OkTopk | None = None,
        profile_steps: int = 10,
        memory: Lean | None = None,  # noqa: ARG002 - it is None: with any, __new__ makes another class
        **options: Any,
    ) -> None:
        check_compress(compress)
        wishes = TuningOptions(planner, plan, network, lanes, profile_steps)
        given = signature(DistributedDataParallel.__init__).bind(self, module, *args, **options).arguments
        mesh = given.get("device_mesh")
        group = mesh.get_group(mesh_dim=0) if mesh is not None else given.get("process_group") or dist.group.WORLD
        wishes.check_agreed(module, group, f"compress {compress}")
        super().__init__(module, *args, **options)
        self._idle = self._why_not(given, wishes, isinstance(compress, OkTopk))
        if dist.get_world_size(self.process_group) == 1 and not self.static_graph:  # whose first step must synchronise
            self.require_backward_grad_sync = False  # as under no_sync()
            self._alone = not self.device_ids  # else DDP moves the inputs
        if not self._idle:
            self._tune(wishes, self._collectives(compress), reduced_parameters(self))
        elif dist.get_world_size(self.process_group) == 1:
            self._memory = self._collectives(compress)

    def _why_not(self, given: dict[str, Any], wishes: TuningOptions, compressed: bool) -> str:
        """Why there is nothing to plan here; empty if there is, or a checkpoint may hold something to send."""
        if dist.get_world_size(self.process_group) == 1:
            return "there is one rank, so nothing to send"
        if wishes.profile_steps == 0 and wishes.plan is None and not compressed:
            return "profile_steps is 0"
        if self.device_type == "cuda" and "nccl" not in dist.get_backend_config(self.process_group):
            return "its gradients are on a GPU and its process group has no NCCL"
        if any(self._build_params_for_reducer()[1]):
            return "an embedding has sparse gradients, which DDP sends by themselves"
        if used := [name for name in OWN_WAYS if given.get(name)]:
            return f"DDP's {used[0]} arranges communication its own way"
        return ""

    def _collectives(self, compress: str | OkTopk | None) -> Collectives:
        """What buckets can name, by what the user asked for."""
        if not isinstance(compress, OkTopk):
            return DenseCollectives(compress)
        if self.find_unused_parameters and not self._idle:
            raise ValueError(
                "OkTopk with find_unused_parameters=True: DDP drops the averages of parameters that no rank used, "
                "and with them what had waited to be sent; leave one of the two away"
            )
        owner = weakref.ref(self)  # not the other way round: a dropped model must be able to go
        return SparseCollectives(
            compress,
            reduced_parameters(self),
            self.process_group,
            lambda: (ddp := owner()) is not None and (ddp._alone or ddp.require_backward_grad_sync),
        )

    def explain(self) -> str:
        """The plan, what it was predicted to gain and did gain, what is exposed; or why there is no plan."""
        join = "\nInside join() nothing is planned: ranks that have run out of inputs could take no part in it."
        return super().explain() + (join if self._inside_join() else "")

    def close(self) -> None:
        """Release hooks, groups and threads; the module can be wrapped again. The wrapper cannot be used afterwards."""
        if self._tuner is not None:
            self._release()
        self._let_go()
        self._alone = False
        unwrap(self)

    # DDP's seams.

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; with one rank, nothing else."""
        if self._alone:
            return self.module(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)

    @_disable_dynamo(recursive=False)
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._idle == CLOSED:
            raise RuntimeError("this DataParallel was closed: wrap the module again")
        tuner = self._tuner
        if tuner is not None:
            if torch.is_grad_enabled():
                self._follow_scale()
            if torch.is_grad_enabled() and not self._inside_join():
                tuner.before_forward(averaged=self.require_backward_grad_sync)
            tuner.live.drain_buffers()  # after the step's first mark: what of it is not hidden counts
        return super()._pre_forward(*inputs, **kwargs)

    @_disable_dynamo(recursive=False)
    def _post_forward(self, output: Any) -> Any:
        output = super()._post_forward(output)
        if self._tuner is not None and self._will_average():
            self._tuner.after_forward(output)
        return output

    def _will_average(self) -> bool:
        """Whether this forward's backward will be averaged among all ranks."""
        return torch.is_grad_enabled() and self.require_backward_grad_sync and not self._inside_join()

    def _inside_join(self) -> bool:
        return self._joining and self._join_config.enable  # which torch leaves enabled when a join() has ended

    def join_hook(self, **options: Any) -> Any:
        """As DDP's; called when a join() begins."""
        self._joining = True
        return super().join_hook(**options)

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        super()._sync_final_model(is_last_joiner)
        self._joining = False

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> Any:
        """As DDP's, but keeps the sum: in a synchronised step it is the number of ranks that have not joined."""
        hook = self._tuner.live.hook if self._tuner is not None else None
        if hook is None:
            return super()._check_global_requires_backward_grad_sync(is_joined_rank)
        active = torch.full((1,), float(self.require_backward_grad_sync and not is_joined_rank), device=self.device)
        work = dist.all_reduce(active, group=self.process_group, async_op=True)

        def remaining() -> int:
            work.wait()
            return int(active.item())

        hook.divisor = None if self._divide_by_initial_world_size else remaining
        return remaining() != 0 if is_joined_rank else None

    def _sync_buffers(self) -> None:
        done = False
        if self._tuner is not None:
            if self._join_config.enable or hasattr(self, "buffer_hook"):
                self._tuner.live.discard_buffers()
            else:
                done = self._tuner.live.sync_buffers()
        if not done:
            super()._sync_buffers()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Run your own hook with DDP's own buckets: there will be no plan."""
        if self._tuner is not None:
            if self._tuner.live.hook is not None:
                raise RuntimeError("DataParallel runs a plan already: register a comm hook before the first step")
            self._release()
            self._tuner = self._memory = None
            self._idle = f"the comm hook {getattr(hook, '__qualname__', hook)} was registered"
        self.require_backward_grad_sync, self._alone = True, False
        super().register_comm_hook(state, hook)

    def __getstate__(self) -> dict[str, Any]:
        attributes: dict[str, Any] = super().__getstate__()
        for name in ("_tuner", "_release", "_memory", "_scaler"):
            attributes.pop(name, None)
        if self._tuner is not None:
            attributes["_comm_hooks"] = []  # ours: the copy has none
        return attributes

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tuner, self._idle = None, "it is a copy"
        self._alone, self.require_backward_grad_sync = False, True  # it may have been copied into a larger world
