"""Fast links inside a lab's host: FSDP2's ranks read each other's memory, and nothing passes a socket.

Ranks of one host of the lab may share a GPU. NCCL refuses that inside a host, so it takes them for different hosts and
sends through the host's loopback, at 1.5 GB/s: far from the 100 to 900 GB/s between GPUs of a real node. With
``HostMemory`` gathers and reduce-scatters inside a host are copies in the GPU's memory instead, and what is sent
between hosts still passes their links. It is for benchmarks, and is to be given to all contestants alike.

On a GPU the memory is torch's symmetric memory, and everything is ordered on the current stream. On CPUs, it is a file
that the ranks map.
"""

import os
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from anabranch.exchange.agreement import from_all_ranks
from anabranch.exchange.interface import Collective, Group, Steps
from anabranch.values.network import ALL_GATHER, REDUCE_SCATTER

SAME_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's own check is for programs that forgot to set a device
SHARED_FILES = Path("/dev/shm")
ROOM = 2  # a window that is too small gets so many times what is asked for
ALIGNED = 16  # bytes: parts of a window begin at a multiple, whatever is stored in them


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

    def __init__(self, nbytes: int, group: Group, device: torch.device, timeout_ms: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        os.environ.setdefault(SAME_GPU, "1")
        own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(own, group)
        self._timeout_ms = timeout_ms
        self.parts = [self._handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(group.size())]

    def barrier(self) -> None:
        """On the current stream; the host does not wait."""
        self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)


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

    Every rank of the group must call them in the same order with the same sizes.
    """

    def __init__(self, group: Group, device: torch.device, timeout_ms: int = 60_000) -> None:
        self._group, self._device, self._timeout_ms = group, device, timeout_ms
        self._window: Window | None = None

    def gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """``whole`` becomes what all ranks have in ``own``; ``own`` may be this rank's part of it."""
        window, rank = self._offer(own), self._group.rank()
        for other, (part, target) in enumerate(zip(window.parts, whole.chunk(self._group.size()), strict=True)):
            if other != rank or target.data_ptr() != own.data_ptr():
                target.copy_(part[: own.nbytes].view(own.dtype))
        window.barrier()  # before anybody overwrites what others still read

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, average: bool) -> None:
        """``own`` becomes this rank's part of the sum, or the average, of what all ranks have in ``whole``."""
        window, rank = self._offer(whole), self._group.rank()
        nbytes = own.nbytes
        theirs = [part[rank * nbytes : (rank + 1) * nbytes].view(own.dtype) for part in window.parts]
        own.copy_(theirs[0])
        for other in theirs[1:]:
            own.add_(other)
        if average:
            own.div_(len(theirs))
        window.barrier()

    def _offer(self, tensor: torch.Tensor) -> Window:
        """A window in which every rank's part begins with its tensor."""
        nbytes = tensor.nbytes
        if self._window is None or self._window.parts[0].numel() < nbytes:
            self._window = self._new_window(-(-ROOM * nbytes // ALIGNED) * ALIGNED)
        own = self._window.parts[self._group.rank()]
        own[:nbytes].view(tensor.dtype).copy_(tensor.flatten())
        self._window.barrier()
        return self._window

    def _new_window(self, nbytes: int) -> Window:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # what still reads the old one
            return GpuWindow(nbytes, self._group, self._device, self._timeout_ms)
        return CpuWindow(nbytes, self._group)


class _Allocates:
    """What FSDP2 asks of its collectives beside the call: memory for their results."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


def _check_in_order(async_op: bool) -> None:
    if async_op:
        raise ValueError("async_op is True: expected False, as FSDP2 calls its collectives by default")


class Gather(_Allocates):
    """FSDP2's all-gather."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Group,  # noqa: ARG002 - FSDP2 names it
        async_op: bool = False,
    ) -> None:
        _check_in_order(async_op)
        self._memory.gather(output_tensor, input_tensor)


class ReduceScatter(_Allocates):
    """FSDP2's reduce-scatter."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Group,  # noqa: ARG002 - FSDP2 names it
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        _check_in_order(async_op)
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"op is {op}: expected SUM or AVG, which FSDP2 uses without set_gradient_divide_factor()")
        self._memory.reduce_scatter(output_tensor, input_tensor, average=op == dist.ReduceOp.AVG)


class FastHost:
    """The links inside this rank's host, for every model of a benchmark that is sharded among the ranks of ``group``.

    Gathers and reduce-scatters of FSDP2 are on different streams, so each of them has memory of its own.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._gathers, self._reductions = HostMemory(group, device), HostMemory(group, device)

    def apply_to(self, model: nn.Module) -> None:
        """Let this model's gathers and reduce-scatters take these links; after ``fully_shard``, on every rank."""
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.set_custom_all_gather(Gather(self._gathers))  # type: ignore[arg-type]
                unit.set_custom_reduce_scatter(ReduceScatter(self._reductions))  # type: ignore[arg-type]

    def collectives(self) -> dict[str, Collective]:
        """The same as collectives that can be measured."""

        def gather(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:  # noqa: ARG001
            self._gathers.gather(buffer, buffer.chunk(group.size())[group.rank()])
            yield from ()

        def reduce_scatter(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:  # noqa: ARG001
            own = buffer.chunk(group.size())[group.rank()]
            self._reductions.reduce_scatter(own, buffer, average=True)
            yield from ()

        return {ALL_GATHER: gather, REDUCE_SCATTER: reduce_scatter}
