"""Process groups written in Python, as torchft's are."""

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future


class Done(dist._Work):
    """Work of a Python class that is done when it is made."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        return self.future


def done_future(result: Any) -> Any:
    """Work of torch's own class around a future that is done."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


class PythonGroup(dist.ProcessGroup):
    """Collectives by ``inner``, or nothing at all on one rank; ``work`` makes what a collective returns."""

    def __init__(self, inner: dist.ProcessGroup | None, work: Any) -> None:
        rank, world_size = (inner.rank(), inner.size()) if inner is not None else (0, 1)
        super().__init__(rank, world_size)
        self.inner = inner
        self.work = work

    def allreduce(self, tensors: Any, options: Any) -> Any:
        if self.inner is not None:
            self.inner.allreduce(tensors, options).wait()
        return self.work(tensors)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        if self.inner is not None:
            self.inner.broadcast(tensors, options).wait()
        return self.work(tensors)

    def allgather(self, outputs: Any, inputs: Any, options: Any) -> Any:
        if self.inner is not None:
            self.inner.allgather(outputs, inputs, options).wait()
        else:
            for output, offered in zip(outputs, inputs, strict=True):
                output[0].copy_(offered)
        return self.work(outputs)

    def getBackendName(self) -> str:  # noqa: N802 - torch calls it by this name
        return "python"
