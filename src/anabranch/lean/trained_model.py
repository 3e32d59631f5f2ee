"""What Lean expects of a model between steps: the parameters it was wrapped with, frozen alike on all ranks."""

from collections.abc import Callable, Mapping
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import nn

from anabranch.exchange.agreement import check_same, explained
from anabranch.exchange.interface import Group, issued
from anabranch.exchange.model_parameters import ignored_names


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, by name; shared ones once; without those that DDP ignores."""
    ignored = ignored_names(module)
    return {n: p for n, p in module.named_parameters() if p.requires_grad and n not in ignored}


class TrainedModel:
    """A module whose parameters may be frozen after wrapping, but not added, replaced, unfrozen or converted.

    ``parameters``: those that required gradients when it was wrapped.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = trained_parameters(module)
        self._memory_formats = {name: _memory_format(parameter) for name, parameter in self.parameters.items()}
        self._remember()

    def check(self) -> None:
        """Raise if the parameters were changed, other than by freezing; fast if nothing has changed."""
        if self.unchanged():
            return
        for name, parameter in trained_parameters(self.module).items():
            now = _memory_format(parameter)
            was = self._memory_formats.get(name, "not trained")
            if was != now or self.parameters[name] is not parameter:
                raise RuntimeError(
                    f"{name} is {now} and was {was} when the model was wrapped: it was converted, moved, unfrozen, "
                    "added or replaced since, and its bucket and optimizer were made then; do so before wrapping, or "
                    "close() this DataParallel and wrap the module again"
                )
        self._remember()

    def unchanged(self) -> bool:
        """Whether the module has the same parts and parameters, with the same dtype, device, strides and freezing.

        Asked before every forward; faster than a walk over all names.
        """
        return self._now() == self._before

    def _remember(self) -> None:
        self._tables = [table for part in self.module.modules() for table in (part._parameters, part._modules)]
        self._every_parameter = list(self.module.parameters())
        self._kept_alive = [part for table in self._tables for part in table.values()]  # so that no id is reused
        self._before = self._now()

    def _now(self) -> tuple[list[int], list[object]]:
        return [id(part) for table in self._tables for part in table.values()], [
            (parameter.dtype, parameter.device, parameter.requires_grad, parameter.stride())
            for parameter in self._every_parameter
        ]


def compare_frozen(parameters: Mapping[str, nn.Parameter], control: Group) -> Callable[[], None]:
    """Start to compare between ranks which parameters are frozen, in every averaged backward pass. Collective.

    The returned function waits for the answer, and raises DisagreementError on every rank unless all have frozen the
    same ones. One that is frozen on some ranks only would part the ranks' weights. The message has 16 bytes and is sent
    while backward computes the first bucket, on ``control``, a group for small messages in host memory.
    """
    if dist.get_world_size(control) == 1:
        return lambda: None
    flags = bytes(parameter.requires_grad for parameter in parameters.values())
    digest = int.from_bytes(sha256(flags).digest()[:7])
    extremes = torch.tensor([digest, -digest])  # the largest digest of all ranks, and the smallest times −1
    work = dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=control, async_op=True)
    work = issued(work, "which parameters are frozen")

    def check() -> None:
        with explained("ranks could not compare which parameters are frozen"):
            work.wait()
        largest, smallest = extremes.tolist()
        if largest != -smallest:
            lines = [f"{name} with requires_grad={p.requires_grad}" for name, p in parameters.items()]
            check_same("which parameters are frozen (no rank has updated anything in this step)", lines, control)

    return check


def _memory_format(parameter: nn.Parameter) -> str:
    return f"{parameter.dtype} on {parameter.device} with strides {parameter.stride()}"
