"""Every private name of torch's DistributedDataParallel that we use: its bucket layout and its extension points.

torch builds buckets by size, and rebuilds them once, in the order that rank 0 observed, before the second step. Here
that one rebuild builds a layout of our choice, so that it is in force from the next step on, for any partition of the
gradients. Tested against every supported torch version; a test checks that no other file uses such a name.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from threading import Lock, get_ident
from typing import Any, Self

import torch
import torch.distributed
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from anabranch.exchange.agreement import explained

dist: Any = torch.distributed  # its private names are in no type stub

Hook = Callable[[object, GradBucket], torch.futures.Future[torch.Tensor]]
PATCH_LOCK = Lock()
BucketIndices = list[list[int]]  # buckets of indices into the reducer's parameters, in launch order


class ExtensibleDDP(DistributedDataParallel):
    """A DistributedDataParallel whose extension points have names of our own, for a subclass to override."""

    _joining = False
    _graph_cutter: Any = None  # decides where torch.compile cuts the model's graphs; None: torch does
    _logged_before: Mapping[str, Any] | None = None  # the logging data of the reducer that this one has replaced

    def _before_forward(self, *inputs: Any, **kwargs: Any) -> None:
        """Called before DDP prepares for a forward."""

    def _after_forward(self, output: Any) -> None:
        """Called after DDP has prepared for a forward's backward."""

    def _install_buffers(self) -> bool:
        """Called where DDP would broadcast buffers; True if the buffers are installed already."""
        return False

    def _discard_buffers(self) -> None:
        """Called instead of ``_install_buffers`` where a buffer hook or join() broadcasts buffers."""

    def _before_comm_hook(self, name: str) -> None:
        """Called before a comm hook of the user's is registered."""

    def _use_divisor(self, divisor: Callable[[], int] | None) -> bool:  # noqa: ARG002
        """Called under join(): ``divisor`` returns the divisor of averages; None means the world size.

        Returns whether the divisor is used; if not, DDP divides by its own.
        """
        return False

    @property
    def _inside_join(self) -> bool:
        return self._joining and bool(self._join_config.enable)  # torch leaves it enabled after a join() has ended

    @property
    def _has_sparse_gradients(self) -> bool:
        return any(self._build_params_for_reducer()[1])

    def _sends_deferred_buffers(self) -> bool:
        """Whether DDP itself would broadcast buffers before the next forward."""
        return (
            bool(self.will_sync_module_buffers()) and not hasattr(self, "buffer_hook") and not self._join_config.enable
        )

    def _current_buffers(self) -> list[torch.Tensor]:
        self._assign_modules_buffers()  # DDP does this before it sends buffers, since they may have been replaced
        return list(self.modules_buffers)

    def _drop_comm_hooks(self, attributes: dict[str, Any]) -> None:
        attributes["_comm_hooks"] = []

    @_disable_dynamo(recursive=False)
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._before_forward(*inputs, **kwargs)
        return super()._pre_forward(*inputs, **kwargs)

    @_disable_dynamo(recursive=False)
    def _post_forward(self, output: Any) -> Any:
        output = super()._post_forward(output)
        self._after_forward(output)
        return output

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """As DDP's method, at any time between steps; from then on there is no plan."""
        self._check_comm_hook(hook)
        self._before_comm_hook(getattr(hook, "__qualname__", repr(hook)))
        super().register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._before_comm_hook(str(comm_hook_type))
        super()._register_builtin_comm_hook(comm_hook_type)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """As DDP's method; a new reducer has no times before its second step, and counts iterations from 0."""
        now: dict[str, Any] = super()._get_ddp_logging_data()
        if self._logged_before is None:
            return now
        iterations = int(self._logged_before.get("iteration", 0)) + int(now.get("iteration", 0))
        return {**self._logged_before, **now, "iteration": iterations}

    @_disable_dynamo
    def _sync_buffers(self) -> None:
        if self._join_config.enable or hasattr(self, "buffer_hook"):
            self._discard_buffers()
        elif self._install_buffers():
            return
        super()._sync_buffers()

    def join_hook(self, **options: Any) -> Any:
        """As DDP's method; torch calls it when a join() begins."""
        self._joining = True
        return super().join_hook(**options)

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        super()._sync_final_model(is_last_joiner)
        self._joining = False

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> Any:
        """As DDP's method, but keeps the sum: in a synchronised step it is the number of ranks that have not joined."""
        if not self._use_divisor(None):
            return super()._check_global_requires_backward_grad_sync(is_joined_rank)
        active = torch.full((1,), float(self.require_backward_grad_sync and not is_joined_rank), device=self.device)
        work = torch.distributed.all_reduce(active, group=self.process_group, async_op=True)
        assert work is not None

        @explained("ranks could not count those that have inputs left, inside join()")
        def remaining() -> int:
            work.wait()
            return int(active.item())

        self._use_divisor(None if self._divide_by_initial_world_size else remaining)
        return remaining() != 0 if is_joined_rank else None


def reduced_parameters(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters whose gradients the reducer averages, by name, in the reducer's order; shared ones once."""
    names = {parameter: name for name, parameter in ddp.module.named_parameters()}
    return {names[parameter]: parameter for parameter in ddp._build_params_for_reducer()[0]}


def running_ddp_of(parameter: nn.Parameter | None) -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward is running now, if it averages this parameter."""
    running: Any = DistributedDataParallel._active_ddp_module
    known = getattr(running, "_module_parameters", ())  # LeanDataParallel has none
    return running if any(one is parameter for one in known) else None


@contextmanager
@_disable_dynamo(recursive=False)
def compiled_as_ddp(wrapper: Any) -> Iterator[None]:
    """A context in which torch compiles a model for this wrapper as it would for a DistributedDataParallel.

    The wrapper has a ``bucket_bytes_cap``, and may have a graph cutter.
    """
    outer = DistributedDataParallel._active_ddp_module
    DistributedDataParallel._active_ddp_module = wrapper
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = outer


def running_graph_cutter() -> Any:
    """The graph cutter of the wrapper whose forward is running now; None if it has none."""
    return getattr(DistributedDataParallel._active_ddp_module, "_graph_cutter", None)


def relayout(ddp: Any, layout: BucketIndices | None, hook: Hook | None) -> None:
    """Give a live DDP these buckets and this comm hook from its next step on; None restores DDP's own.

    Does not communicate: the caller must pass the same layout on every rank before the same forward. Call it at the
    start of a forward that will be differentiated and synchronised, never between a forward and its backward.
    """
    ddp._check_reducer_finalized()  # raises DDP's own error if a backward did not finish
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._logged_before = {k: value for k, value in ddp._get_ddp_logging_data().items() if k != "comm_hook"}
    ddp._remove_autograd_hooks()
    ddp.reducer = None  # frees the old buckets before the new ones are allocated
    ddp.logger = None
    with _initial_layout(layout) if layout is not None else nullcontext():
        ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = layout is not None
    if ddp.static_graph:
        # Otherwise the new reducer would wait for a callback that only DDP's first iteration queues, and never reduce.
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    if layout is not None and (ddp.static_graph or not ddp.find_unused_parameters):
        _use_up_rebuild(ddp, layout)
    ddp._comm_hooks = []
    if hook is not None:
        ddp._comm_hooks.append((hook, None))
        ddp.logger._set_comm_hook_name(hook.__qualname__)
        dist._register_comm_hook(ddp.reducer, None, hook)


def unwrap(ddp: Any) -> None:
    """Remove a DDP's hooks from its module, which can then be wrapped again; the wrapper is unusable afterwards."""
    ddp._remove_autograd_hooks()


class _Token:
    __slots__ = ("__weakref__",)


class Reduction(weakref.ref[_Token]):
    """The next reduction of a DDP's reducer; ``on_end`` is called in backward, when it has averaged all gradients.

    The reducer holds a future until then and drops it, and with it a token, whose end queues this weak reference as a
    callback of autograd. So each reduction is seen once, wherever its gradients come from. Autograd raises what a
    signal handler raises in ``on_end`` (KeyboardInterrupt). Python would drop it in a weak reference's own callback,
    so that is a function in C. Drop this object before the reducer, which may be freed where no backward is running.
    """

    def __new__(cls, ddp: Any, on_end: Callable[[], None]) -> Self:  # noqa: ARG004
        token = _Token()
        held: torch.futures.Future[Any] = torch.futures.Future()
        held.set_result(token)
        ddp.reducer._install_post_backward_futures([held])
        return super().__new__(cls, token, Variable._execution_engine.queue_callback)

    def __init__(self, ddp: Any, on_end: Callable[[], None]) -> None:  # noqa: ARG002
        self._on_end = on_end

    @property
    def over(self) -> bool:
        """Whether the reducer has ended it."""
        return super().__call__() is None

    def __call__(self) -> None:
        """Called by autograd, once the reducer has ended it."""
        self._on_end()


def built_by_ddp(ddp: DistributedDataParallel) -> BucketIndices | None:
    """The buckets that DDP itself has rebuilt from the order it observed; None if it has not, or never does.

    ``relayout`` with these buckets leaves nothing to rebuild; with None, DDP would rebuild, and so communicate, in the
    next forward.
    """
    rebuilt = DistributedDataParallel._get_ddp_logging_data(ddp).get("rebuilt_per_bucket_param_indices")
    return [[int(index) for index in bucket.split()] for bucket in rebuilt.split(",")] if rebuilt else None


@contextmanager
def _initial_layout(layout: BucketIndices) -> Iterator[None]:
    """Within this context DDP's helper builds this layout; it reverses the list that the patched function returns.

    Models of other threads may be wrapped or change their layout in the meantime: the patch is for this thread only.
    """
    patching_thread = get_ident()
    with PATCH_LOCK:
        real = dist._compute_bucket_assignment_by_size

        def patched(*args: Any, **options: Any) -> Any:
            if get_ident() != patching_thread:
                return real(*args, **options)
            return layout[::-1], [0] * len(layout)

        dist._compute_bucket_assignment_by_size = patched
        try:
            yield
        finally:
            dist._compute_bucket_assignment_by_size = real


def _use_up_rebuild(ddp: Any, layout: BucketIndices) -> None:
    """Have the reducer do its one rebuild now, with this layout, so that it never rebuilds by itself."""
    group = _LayoutAsProcessGroup(layout)  # a reference is needed until the rebuild is over, for its Python override
    ddp.reducer._push_all_rebuilt_params()
    ddp.reducer._update_process_group(group)
    rebuilt = ddp.reducer._rebuild_buckets()
    ddp.reducer._update_process_group(ddp.process_group)
    if not rebuilt:
        raise RuntimeError(
            f"torch {torch.__version__} did not take the planned buckets; please report this, and pass profile_steps=0 "
            "to run with DDP's own buckets until it is fixed"
        )


class _LayoutAsProcessGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group of one rank whose broadcasts return a layout, as if rank 0 had sent it.

    A reducer that rebuilds broadcasts twice: first the indices of all buckets in a row and the number of buckets, then
    the length of each bucket.
    """

    def __init__(self, layout: BucketIndices) -> None:
        super().__init__(0, 1)
        flat = [index for bucket in layout for index in bucket]
        self._broadcasts = [[*flat, len(layout)], [len(bucket) for bucket in layout]]
        self._completed = _CompletedWork()

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # noqa: ARG002
        tensors[0].copy_(torch.tensor(self._broadcasts.pop(0), dtype=tensors[0].dtype))
        return self._completed


class _CompletedWork(dist.Work):  # type: ignore[misc]
    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        return True
