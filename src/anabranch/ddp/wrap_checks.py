"""What is checked when a model is wrapped: it is not wrapped already, and DDP can average it in buckets."""

import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anabranch.ddp.compiled.graphs import optimize_ddp_mode
from anabranch.ddp.reducer import running_ddp_of
from anabranch.exchange.model_parameters import ignored_names


def check_unwrapped(module: nn.Module, ours: type) -> None:
    """Raise ValueError if this module, or a part of it whose gradients would be averaged here, is wrapped already.

    Wrappers are those of DistributedDataParallel and of the class ``ours``.
    """
    averaged = {name for name, _ in module.named_parameters()}.difference(ignored_names(module))
    for name, part in module.named_modules():
        inside_part = f"{name}." if name else ""
        if isinstance(part, DistributedDataParallel | ours) and any(
            parameter.startswith(inside_part) for parameter in averaged
        ):
            what, inside = (f"its part {name}", "the part") if name else ("the module", "model")
            raise ValueError(
                f"{what} is a {type(part).__name__} already, and gradients would be averaged twice: wrap it once; wrap "
                f"{inside}.module instead, after close() if it is one of anabranch's"
            )


def check_outermost(wrapper: nn.Module) -> None:
    """Raise RuntimeError if a DistributedDataParallel around this wrapper averages the same parameters.

    Call it in the wrapper's forward: the constructor of the outer one, which is torch's, cannot check it.
    """
    outer = running_ddp_of(next(wrapper.parameters(), None))
    if outer is not None and outer is not wrapper:
        raise RuntimeError(
            f"this {type(wrapper).__name__} was wrapped once more, in a {type(outer).__name__}, and gradients would be "
            "averaged twice: leave the outer one out (frameworks wrap by themselves: give them the plain model)"
        )


def dtensor_reason(module: nn.Module, device_mesh: Any = None) -> str:
    """Why nothing is planned for a model with DTensors that DDP can train; empty if it has none.

    DDP trains tensor-parallel models if it is given the data-parallel dimension of their mesh: it makes local tensors
    of their parameters. Raises ValueError for any other DTensor, which DDP cannot average.
    """
    tensors: Any = sys.modules.get("torch.distributed.tensor")  # who has a DTensor has imported it
    if tensors is None:
        return ""
    ignored = ignored_names(module)
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, tensors.DTensor) or name in ignored:
            continue
        if device_mesh is None or parameter.device_mesh == device_mesh:  # sharded among the ranks of this DDP
            placements = ", ".join(map(str, parameter.placements))
            raise ValueError(
                f"{name} is a DTensor ({placements}), as fully_shard() and parallelize_module() make them, and "
                "DataParallel averages whole gradients: leave it out under fully_shard(), which averages by itself; "
                'with tensor parallelism give device_mesh=mesh["dp"], the other dimension of a 2-D mesh'
            )
        return f"{name} is a DTensor (tensor parallel), of which DDP averages local parts"
    return ""


def python_reducer_reason() -> str:
    """Why nothing can be planned if DDP is wrapped now: it would have a reducer in Python; empty if it would not."""
    mode = optimize_ddp_mode()
    return f'torch._dynamo.config.optimize_ddp is "{mode}", so DDP averages without buckets' if "python" in mode else ""
