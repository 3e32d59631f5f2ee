"""Torch's tests for GPUs on a machine without one: whatever they put on a GPU stays on the CPU.

Most of torch's DDP tests ask for a GPU per rank and use nothing of it but its memory. In a process prepared by
``pretend()`` they find eight GPUs, every request for one gives the CPU, and DDP's ``device_ids`` are left out. A test
that needs more of a GPU fails under stock DDP, too, and is not counted.
"""

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

GPUS = 8
# Functions whose first argument may be a device.
FIRST_ARGUMENT = {torch.Tensor.to, torch.Tensor.cuda}


class OnCpu(TorchFunctionMode):
    """Replaces the device in each call of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if func is torch.Tensor.to:
            args = (args[0], *(on_cpu(value) for value in args[1:]))
        return func(*args, **kwargs)


def on_cpu(device: Any) -> Any:
    """The CPU for a GPU; everything else as it is."""
    is_gpu = isinstance(device, int) and not isinstance(device, bool)
    is_gpu = is_gpu or (isinstance(device, str | torch.device) and str(device).startswith("cuda"))
    return torch.device("cpu") if is_gpu else device


class Stream(nullcontext):  # type: ignore[type-arg]
    """A stream or an event: everything has happened when it is asked for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def _nothing(*_: Any, **__: Any) -> None:
    pass


def pretend() -> None:
    """From now on this process, and those forked from it, have eight GPUs that are the CPU."""
    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: GPUS,
        "current_device": lambda: 0,
        **dict.fromkeys(("set_device", "synchronize", "manual_seed", "manual_seed_all", "empty_cache"), _nothing),
        **dict.fromkeys(("device", "Stream", "Event", "stream", "current_stream"), Stream),
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.Stream = torch.Event = Stream  # type: ignore[misc, assignment]
    for name in ("current_stream", "set_stream"):
        setattr(torch.accelerator, name, Stream)
    torch.accelerator.current_device_index = lambda: 0
    common_distributed.TEST_CUDA = True
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign, assignment]
    moved = torch.nn.Module.to
    torch.nn.Module.to = lambda self, *args, **kwargs: moved(  # type: ignore[method-assign]
        self, *map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()}
    )
    _leave_out_devices()
    OnCpu().__enter__()


def _leave_out_devices() -> None:
    construct = DistributedDataParallel.__init__

    @functools.wraps(construct)
    def construct_on_cpu(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **options: Any
    ) -> None:
        construct(self, module, None, None, *args, **options)

    DistributedDataParallel.__init__ = construct_on_cpu
