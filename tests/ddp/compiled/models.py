"""Compiled models on ranks: what ran when, and how often the backend was called."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from time import sleep
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.parallel import DistributedDataParallel

from anabranch import DataParallel

WIDTH = 160  # a layer has 100 KiB, more than the least that is cut off
LAYERS = 6
ORDERS = ("compile(DP)", "DP(compile(net))", "net.compile()", "DP.compile()")


class Net(nn.Module):
    """Layers with buffers; changes activations in place, as ResNets do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu_(layer(x))
        result: torch.Tensor = self.norm(x)
        return result


@dataclass
class Log:
    """A backend that notes when each part runs backward and how many parts were compiled; gradients are noted, too."""

    events: list[str] = field(default_factory=list)
    compiled: list[int] = field(default_factory=list)  # the step in which each part was
    step: int = 0
    symbolic: bool = False  # a part was compiled for any shape
    name: str = ""  # another backend of torch, which does not tell when its parts run
    part_s: float = 0.0  # what the backward of each part takes at least, so that a busy machine changes little
    recomputes: bool = False  # by torch's partitioner, which may compute activations again in backward
    recomputed: int = 0  # activations of this kind in the backward of all parts

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.compiled.append(self.step)
        shapes = [value.shape for value in inputs if isinstance(value, torch.Tensor)]
        self.symbolic |= any(isinstance(size, torch.SymInt) for shape in shapes for size in shape)
        if self.name:
            return torch._dynamo.lookup_backend(self.name)(graph, inputs)

        def forward(module: Any, _: Any) -> Any:
            return make_boxed_func(module.forward)

        def backward(module: Any, _: Any) -> Any:
            self.recomputed += sum(node.target is torch.ops.aten.sin.default for node in module.graph.nodes)

            def run(*values: Any) -> Any:
                results = module(*values)
                sleep(self.part_s)
                self.events.append("backward")
                return results

            return make_boxed_func(run)

        options = {"partition_fn": min_cut_rematerialization_partition} if self.recomputes else {}
        return aot_autograd(fw_compiler=forward, bw_compiler=backward, **options)(graph, inputs)

    def watch(self, module: nn.Module) -> None:
        """Note the gradients of a module by name."""

        def noter(name: str) -> Callable[[torch.Tensor], None]:
            return lambda _: self.events.append(name)

        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(noter(name))

    def parts(self) -> list[list[str]]:
        """The gradients that left together in the last steps, after each backward of a part."""
        found: list[list[str]] = []
        for event in self.events:
            if event == "backward":
                found.append([])
            else:
                found[-1].append(event)
        return found


def forget_compiled() -> None:
    """Begin a case in a process in which others were compiled: neither their models nor their graphs are left."""
    gc.collect()
    torch._dynamo.reset()


def compiled(net: nn.Module, order: str, backend: Log, **options: Any) -> tuple[DataParallel, nn.Module]:
    """A DataParallel around a module that is compiled in one of the orders that people use, and what to call."""
    if order == "net.compile()":
        net.compile(backend=backend)
    inner: Any = torch.compile(net, backend=backend) if order == "DP(compile(net))" else net
    wrapped = DataParallel(inner, **{"cache": False, **options})
    backend.watch(net)
    if order == "DP.compile()":
        wrapped.compile(backend=backend)
    called: Any = torch.compile(wrapped, backend=backend) if order == "compile(DP)" else wrapped
    return wrapped, called


def pair(build: Callable[[], nn.Module] = Net) -> tuple[DistributedDataParallel, nn.Module]:
    """An eager DDP around a module, and an equal module."""
    torch.manual_seed(7)
    theirs = DistributedDataParallel(build())
    torch.manual_seed(7)
    return theirs, build()


def inputs(rank: int, step: int, rows: int = 8) -> torch.Tensor:
    """This rank's inputs of a step."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def furthest(theirs: nn.Module, ours: nn.Module) -> float:
    """The largest difference between their parameters."""
    pairs = zip(theirs.parameters(), ours.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


class Residual(nn.Module):
    """Three convolutions with norms and a shortcut; adds and clips in place, as the blocks of torchvision's ResNets."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        wide = 4 * width
        self.first, self.first_norm = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.middle = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.middle_norm = nn.BatchNorm2d(width)
        self.last, self.last_norm = nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module | None = None
        if stride > 1 or channels != wide:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.shortcut is None else self.shortcut(x)
        out = self.relu(self.first_norm(self.first(x)))
        out = self.relu(self.middle_norm(self.middle(out)))
        out = self.last_norm(self.last(out))
        out += identity
        result: torch.Tensor = self.relu(out)
        return result


class ResNet(nn.Module):
    """With 3, 4, 6 and 3 blocks the same operations as torchvision's ResNet-50."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        self.blocks = nn.Sequential()
        channels = width
        for stage, count in enumerate(blocks):
            for number in range(count):
                inner = width << stage
                self.blocks.append(Residual(channels, inner, 2 if stage and not number else 1))
                channels = 4 * inner
        self.head = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return result
