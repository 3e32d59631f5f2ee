"""The parts of a model that must be the same on all ranks."""

from collections.abc import Collection

from torch import nn
from torch.nn.parameter import is_lazy


def ignored_names(module: nn.Module) -> Collection[str]:
    """Names of the parameters and buffers that DDP does not synchronise; torch's own attribute lists them."""
    names: Collection[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return names


def model_lines(module: nn.Module) -> list[str]:
    """A line per synchronised parameter and buffer; ranks with equal lines can train together."""
    parameters = {
        n: f"{n} uninitialized"  # DDP refuses it
        if is_lazy(p)
        else f"{n} {tuple(p.shape)} {p.dtype} grad={p.requires_grad} strides {p.stride()}"
        for n, p in module.named_parameters()
    }
    buffers = {n: f"buffer {n} {tuple(b.shape)} {b.dtype}" for n, b in module.named_buffers()}
    ignored = ignored_names(module)
    return [line for name, line in (parameters | buffers).items() if name not in ignored]
