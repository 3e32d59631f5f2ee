"""What Lean expects of a model between steps: the parameters it was wrapped with, frozen alike on all ranks."""

from collections.abc import Mapping
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import nn

from anabranch.exchange.agreement import check_same, explained
from anabranch.exchange.contracts import Group, issued
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


class FrozenAgreement:
    """Compares between ranks which parameters are frozen, in every averaged backward pass.

    One that is frozen on some ranks only would part the ranks' weights. The message has 16 bytes and is sent while
    backward computes the first bucket.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._extremes = torch.zeros(2, dtype=torch.int64)  # the largest digest of all ranks, and the smallest times −1
        self._work: dist.Work | None = None

    def begin(self, control: Group) -> None:
        """Start to compare, by a group for small messages in host memory; ``check`` must follow. Collective."""
        if dist.get_world_size(control) == 1:
            return
        flags = bytes(parameter.requires_grad for parameter in self._parameters.values())
        digest = int.from_bytes(sha256(flags).digest()[:7])
        self._extremes = torch.tensor([digest, -digest])
        work = dist.all_reduce(self._extremes, op=dist.ReduceOp.MAX, group=control, async_op=True)
        self._work = issued(work, "which parameters are frozen")

    def check(self, control: Group) -> None:
        """Raise DisagreementError on every rank unless all ranks have frozen the same parameters."""
        if self._work is None:
            return
        with explained("ranks could not compare which parameters are frozen"):
            self._work.wait()
        largest, smallest = self._extremes.tolist()
        if largest != -smallest:
            lines = [f"{name} with requires_grad={p.requires_grad}" for name, p in self._parameters.items()]
            check_same("which parameters are frozen (no rank has updated anything in this step)", lines, control)

    def close(self) -> None:
        """Drop the last message, before its group is destroyed."""
        self._work = None


def _memory_format(parameter: nn.Parameter) -> str:
    return f"{parameter.dtype} on {parameter.device} with strides {parameter.stride()}"
