"""A process group whose Gloo operations end when they would on the emulated network, and not before they really have.

An operation is issued on the real backends at once. Its emulated time begins at that moment too, on this rank's own
clock, and its work is done when both have ended. This idealises three things:

* The time of a rank that comes early runs while it waits for the others, so it may continue too soon, by at most the
  operation's own time. The last rank is exact, and in lockstep the last rank decides. A receive that was posted long
  before its send is such a case: it costs nothing more when the message comes.
* Where this machine's memory is slower than the emulated network, an operation takes its real time.
* Timeouts are those of the real operation: an emulated delay never exceeds one.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, ClassVar, NoReturn
from weakref import finalize

import torch
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup, Work
from torch.futures import Future

from anabranch.tools.lab.emulation.link import EmulatedTransfer, LinkDirection, cost
from anabranch.values.links import AlphaBeta

GLOO = ProcessGroup.BackendType.GLOO
# By kind of cost. torch 2.13 gave several a second name; a version's C++ may ask for either.
OPERATIONS: Mapping[str, str] = {
    "all-reduce": "allreduce allreduce_coalesced",
    "all-gather": "allgather allgather_coalesced _allgather_base all_gather_single allgather_into_tensor_coalesced "
    "all_gather_single_coalesced reduce_scatter _reduce_scatter_base reduce_scatter_single "
    "reduce_scatter_tensor_coalesced reduce_scatter_single_coalesced alltoall alltoall_base all_to_all_single",
    "broadcast": "broadcast reduce barrier",
    "gather": "gather scatter",
    "message": "send recv recv_anysource",
}
KINDS = {operation: kind for kind, operations in OPERATIONS.items() for operation in operations.split()}
NO_TIMEOUT = timedelta(0)  # torch's word for "the group's own timeout"
JOIN_S = 1.0


def hidden_from_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile out of ``function``: the reducer of a compiled DDP calls it from within a compiled frame.

    torch's own decorator imports the compiler at the first call. That takes a second, and then functions with
    ``group.WORLD`` for a default keep the group, and Gloo's threads, until the interpreter ends: it may abort.
    """
    hidden = _disable_dynamo(function)

    @wraps(function)
    def either(*args: Any, **options: Any) -> Any:
        return hidden(*args, **options) if "torch._dynamo" in sys.modules else function(*args, **options)

    return either


class FutureCompleter:
    """A daemon thread that completes the futures of one group in the order in which they were requested.

    One per group, because groups must not wait for each other. The thread starts with the first request, because most
    works are waited for and never asked for a future.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[EmulatedWork, Any, Future[Any]] | None] = SimpleQueue()
        self._thread = Thread(target=_complete_all, args=(self._queue,), name="anabranch-emulation", daemon=True)

    def complete(self, work: "EmulatedWork", real_future: Any, future: "Future[Any]") -> None:
        """Give ``future`` the result of ``real_future``, or its error, once ``work`` is done."""
        if self._thread.ident is None:
            self._thread.start()
        self._queue.put((work, real_future, future))

    def close(self) -> None:
        """Let the thread end after the futures that it has."""
        self._queue.put(None)
        # The program's end should not meet a thread in mid-work, nor wait for one that waits for a dead rank.
        if self._thread.ident is not None and self._thread is not current_thread():
            self._thread.join(JOIN_S)


def _complete_all(jobs: "SimpleQueue[tuple[EmulatedWork, Any, Future[Any]] | None]") -> None:
    while (job := jobs.get()) is not None:
        work, real_future, future = job
        try:
            work.wait()
            future.set_result(real_future.wait())
        except BaseException as error:
            future.set_exception(error)
        del job, work, real_future, future  # while get() blocks, nothing here may keep a buffer alive


def _of_real(name: str) -> Any:
    """A method of a work that asks the real one."""
    return lambda work: getattr(work._real, name)()


class EmulatedWork(Work):
    """A real work and its emulated transfer: done when both are. An error of the real work shows at once."""

    def __init__(
        self, real: Work, transfer: EmulatedTransfer, completer: FutureCompleter, devices: Sequence[torch.device]
    ) -> None:
        super().__init__()
        self._real = real
        self._transfer = transfer
        self._completer = completer
        self._devices = devices
        self._future: Future[Any] | None = None

    @hidden_from_compiler
    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for the real operation, at most ``timeout``, then for its emulated time."""
        succeeded = self._real.wait(timeout)
        self._transfer.wait()
        return succeeded

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._real.is_completed() and self._transfer.remaining_s <= 0

    is_success = _of_real("is_success")
    exception = _of_real("exception")
    result = _of_real("result")
    source_rank = _of_real("source_rank")
    _source_rank = _of_real("_source_rank")

    @hidden_from_compiler
    def get_future(self) -> Any:
        """The one future of this work, completed when the work is done."""
        if self._future is None:
            real_future = self._real.get_future()  # torch refuses this for a message, and so do we
            future: Future[Any] = Future(devices=list(self._devices))
            # DDP's reducer cannot read an exception that was set on a future; one that is raised in then() it can.
            self._future = future.then(lambda done: done.wait())
            self._completer.complete(self, real_future, future)
        return self._future


class EmulatedGroup(ProcessGroup):
    """A group that passes every operation to a real group with the same backends, and delays its end.

    Operations that are not in ``KINDS`` carry no data. They reach the backends directly, without delay.
    """

    link: ClassVar[AlphaBeta]
    outbound: ClassVar[LinkDirection]  # of the network interface that all groups of a process share
    inbound: ClassVar[LinkDirection]
    is_cloned_by_torch = True  # every group that torch makes here is emulated

    def __init__(self, store: Any, rank: int, size: int) -> None:
        # With a store, which torch's type stubs ask for, its C++ would not see what is overridden here.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._real: Any = ProcessGroup(store, rank, size)
        self._is_gloo: dict[str, bool] = {}  # by type of device
        self._completer = FutureCompleter()
        finalize(self, self._completer.close)

    def _register_backend(self, device: torch.device, kind: Any, backend: Any = None) -> None:
        super()._register_backend(device, kind, backend)
        self._real._register_backend(device, kind, backend)
        self._is_gloo[device.type] = kind == GLOO

    def _set_default_backend(self, kind: Any) -> None:
        super()._set_default_backend(kind)
        self._real._set_default_backend(kind)

    def get_group_store(self) -> Any:
        return self._real.get_group_store()

    def monitored_barrier(self, *args: Any, **options: Any) -> None:
        """torch's monitored barrier. It returns no work, so its emulated time begins when it has really ended."""
        self._real.monitored_barrier(*args, **options)
        self._start_transfer("barrier", []).wait()

    def split_group(self, *_: Any, **__: Any) -> NoReturn:
        """Refused, because the group that torch would make has no delays."""
        raise NotImplementedError("groups are not split or merged under anabranch lab --emulate: use new_group")

    merge_remote_group = split_group

    def _issue(self, operation: str, args: Sequence[Any], options: Mapping[str, Any]) -> Work:
        arguments = [list(_tensors(argument)) for argument in (*args, *options.values())]
        devices = {tensor.device for tensors in arguments for tensor in tensors}
        work: Work = getattr(self._real, operation)(*args, **options)
        # A barrier names no device: it is emulated where nothing but Gloo could carry it.
        if not all(self._is_gloo.get(kind, False) for kind in {device.type for device in devices} or self._is_gloo):
            return work
        on_gpu = [device for device in devices if device.type == "cuda"]
        return EmulatedWork(work, self._start_transfer(operation, arguments), self._completer, on_gpu)

    def _start_transfer(self, operation: str, arguments: Sequence[Sequence[torch.Tensor]]) -> EmulatedTransfer:
        """Start the operation's emulated time; ``arguments`` holds the tensors of each of its arguments."""
        kind, ranks = KINDS[operation], self.size()
        sizes = [size for tensors in arguments if (size := sum(map(_nbytes, tensors)))]
        nbytes = max(sizes, default=0)  # of inputs and outputs, the one that is the whole
        if kind == "gather":
            nbytes = ranks * min(sizes, default=0)  # only the root has the whole
        elif kind == "all-reduce" and any(tensor.is_sparse for tensors in arguments for tensor in tensors):
            kind, nbytes = "all-gather", ranks * nbytes  # Gloo gathers the entries of all ranks
        directions = [self.outbound] * (not operation.startswith("recv")) + [self.inbound] * (operation != "send")
        return EmulatedTransfer(cost(kind, self.link, ranks, nbytes), directions)


def emulated_group(link: AlphaBeta) -> type[EmulatedGroup]:
    """The class of a process's groups, which share one network interface."""
    operations = {name: _operation(name) for name in KINDS if hasattr(ProcessGroup, name)}
    interface = {"link": link, "outbound": LinkDirection(), "inbound": LinkDirection()}
    return type("EmulatedProcessGroup", (EmulatedGroup,), {**interface, **operations})


def _operation(name: str) -> Callable[..., Work]:
    def operation(self: EmulatedGroup, *args: Any, **options: Any) -> Work:
        return self._issue(name, args, options)

    operation.__name__ = name
    return hidden_from_compiler(operation)


def _tensors(argument: object) -> Iterator[torch.Tensor]:
    """The tensors of an argument: itself, or those in lists of any depth."""
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from _tensors(part)


def _nbytes(tensor: torch.Tensor) -> int:
    if tensor.is_sparse:
        return _nbytes(tensor._indices()) + _nbytes(tensor._values())
    return tensor.numel() * tensor.element_size()
