"""Fast links inside a lab's host: ranks read each other's memory, and nothing passes a socket.

Ranks of one host of the lab may share a GPU. NCCL refuses that inside a host, so it takes them for different hosts and
sends through the host's loopback, at 1.5 GB/s: far from the 100 to 900 GB/s between GPUs of a real node. Here messages
inside a host are copies in the GPU's memory instead, and what is sent between hosts still passes their links.

On a GPU the memory is torch's symmetric memory, and everything is ordered on the current stream, as in NCCL's
collectives without ``async_op``. On CPUs it is a file that the ranks map: for tests, since Gloo's loopback is fast.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.futures import Future

from anabranch.exchange.agreement import from_all_ranks
from anabranch.exchange.communicator import StreamWork
from anabranch.exchange.interface import Group

SAME_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's own check is for programs that forgot to set a device
SHARED_FILES = Path("/dev/shm")
ROOM = 2  # a window that is too small gets so many times what is asked for
ALIGNED = 16  # bytes: parts of a window begin at a multiple, whatever is stored in them
TIMEOUT_MS = 60_000


class Window(Protocol):
    """Memory of the same size on every rank of a group, which all of them can read.

    parts   one tensor of bytes for each rank, in the order of ranks
    """

    parts: list[torch.Tensor]

    def barrier(self) -> None:
        """What ranks have written before it can be read by all of them after it."""
        ...


class GpuWindow:
    """A window in the memory of GPUs of one host, or of one GPU that the ranks share. Collective."""

    def __init__(self, nbytes: int, group: Group, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        os.environ.setdefault(SAME_GPU, "1")
        own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(own, group)
        self.parts = [self._handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(group.size())]

    def barrier(self) -> None:
        """On the current stream; the host does not wait."""
        self._handle.barrier(channel=0, timeout_ms=TIMEOUT_MS)


class CpuWindow:
    """A window in a file of a file system that lies in memory. Collective."""

    def __init__(self, nbytes: int, group: Group) -> None:
        self._group = group
        (name, *_) = from_all_ranks(f"anabranch-{os.getpid()}-{id(self)}".encode(), group)
        path = SHARED_FILES / name.decode()
        size = nbytes * group.size()
        if group.rank() == 0:
            with path.open("wb") as file:
                file.truncate(size)
        try:
            self.barrier()
            whole = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
            self.barrier()
        finally:
            if group.rank() == 0:
                path.unlink()  # the ranks have mapped it, or one has failed
        self.parts = list(whole.split(nbytes))

    def barrier(self) -> None:
        """The host waits."""
        dist.barrier(self._group)


class HostMemory:
    """Collectives of the ranks of one host by way of a window, which grows as needed. For one stream at a time.

    Every rank of the group must call them in the same order with the same sizes. A group is given to each call and not
    kept, so that what a program has destroyed can be freed.
    """

    def __init__(self) -> None:
        self._window: Window | None = None

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, group: Group) -> None:
        """``whole`` becomes what all ranks have in ``own``; ``own`` may be this rank's part of it."""
        window = self._offer(own, group)
        for rank, (part, target) in enumerate(zip(window.parts, _parts(whole, group), strict=True)):
            if rank != group.rank() or target.data_ptr() != own.data_ptr():
                target.copy_(part[: own.nbytes].view(own.dtype))
        window.barrier()  # before anybody overwrites what others still read

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, group: Group, average: bool = False) -> None:
        """``own`` becomes this rank's part of the sum, or the average, of what all ranks have in ``whole``."""
        window = self._offer(whole, group)
        first, *others = _for_rank(window, own.view(-1), group)
        total = own.view(-1).copy_(first)
        for other in others:
            total.add_(other)
        if average:
            total.div_(group.size())
        window.barrier()

    def all_to_all(self, received: torch.Tensor, given: torch.Tensor, group: Group) -> None:
        """Part r of ``received`` becomes this rank's part of what rank r has in ``given``."""
        window, targets = self._offer(given, group), _parts(received, group)
        for target, part in zip(targets, _for_rank(window, targets[0], group), strict=True):
            target.copy_(part)
        window.barrier()

    def _offer(self, tensor: torch.Tensor, group: Group) -> Window:
        """A window in which every rank's part begins with its tensor."""
        nbytes = tensor.nbytes
        if self._window is None or self._window.parts[0].numel() < nbytes:
            self._window = _new_window((ROOM * nbytes // ALIGNED + 1) * ALIGNED, group, tensor.device)
        own = self._window.parts[group.rank()]
        own[:nbytes].view(tensor.dtype).copy_(tensor.flatten())
        self._window.barrier()
        return self._window


def _new_window(nbytes: int, group: Group, device: torch.device) -> Window:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what still reads the old one
        return GpuWindow(nbytes, group, device)
    return CpuWindow(nbytes, group)


def _parts(whole: torch.Tensor, group: Group) -> tuple[torch.Tensor, ...]:
    """One part for each rank, as vectors."""
    return whole.view(-1).tensor_split(group.size())


def _for_rank(window: Window, like: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """This rank's part, of the size and dtype of ``like``, of what every rank has put into the window."""
    begin = group.rank() * like.nbytes
    return [part[begin : begin + like.nbytes].view(like.dtype) for part in window.parts]


class DoneWork(dist.Work):
    """An operation of CPUs that has ended."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: Future[None] = Future()
        future.set_result(None)
        return future


_memories: WeakKeyDictionary[Group, dict[int, HostMemory]] = WeakKeyDictionary()  # of each stream that uses the group


def run(kind: str, group: Group, arguments: tuple[Any, ...]) -> dist.Work | None:
    """Run a collective, one of the methods of ``HostMemory``, with the arguments of torch's ``ProcessGroup``.

    None, and nothing is done, where the ranks of the group are on several hosts, or parts or sums are none of these.
    """
    output, given, *rest, options = arguments
    extra = {}
    if kind == "reduce_scatter":
        extra["average"] = options.reduceOp == dist.ReduceOp.AVG
        if not extra["average"] and options.reduceOp != dist.ReduceOp.SUM:
            return None
    if any(rest) or not is_on_one_host(group):  # "rest" are sizes of uneven parts, of an all-to-all
        return None
    stream = torch.cuda.current_stream(given.device).cuda_stream if given.is_cuda else 0
    memory = _memories.setdefault(group, {}).setdefault(stream, HostMemory())
    collective: Callable[..., None] = getattr(memory, kind)
    collective(output, given, group, **extra)
    return StreamWork(given.device) if given.is_cuda else DoneWork()


def is_on_one_host(group: Group) -> bool:
    """Whether all ranks of a group are on one host of the lab, which numbers ranks host by host."""
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    return len({rank // per_host for rank in dist.get_process_group_ranks(group)}) == 1
