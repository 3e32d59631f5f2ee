"""A model of the user's own for anabranch memory: what module:function makes, and one error for what it does wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from anabranch.tools.cli import user_function
from anabranch.values.errors import AnabranchError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from anabranch.tools.predict.memory.estimator import BuildAt
    from anabranch.tools.predict.memory.probe import Loss

EXAMPLE = "module:function, where function(batch, device) returns a model and its loss as a function of the model"
ON_DEVICE = (
    "one that runs on the device that the function was given, with inputs made there; 'meta' has tensors without data, "
    "whose values cannot be asked for"
)


def build_at(what: str) -> "BuildAt":
    """By batch, what the user's own function makes; ValueError if it cannot be trained where it is asked for."""
    function = user_function.load_function(what, EXAMPLE)
    name = what.partition(":")[2]
    user_function.check_call(what, name, function, "batch", "device")

    def made(batch: int, device: "torch.device") -> "tuple[nn.Module, Loss]":
        with user_function.one_error(what, f"{name}({batch}, {str(device)!r})", EXAMPLE):
            returned = function(batch, device)
        model, loss = user_function.check_returned(what, returned, "loss): a torch module and a function of it")
        for key, parameter in model.named_parameters():
            if parameter.device.type != device.type:
                raise ValueError(
                    f"{what}: {key} of its model is on {parameter.device}, expected on {device}, the device that "
                    f"{name} was given: make the model in it, with device=device"
                )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(f"{what}: no parameter of its model requires a gradient, expected a model that is trained")
        user_function.check_call(what, "loss", loss, "model")
        return model, partial(_loss, what, loss, device)

    return lambda batch: partial(made, batch)


def _loss(what: str, loss: "Loss", device: "torch.device", model: "nn.Module") -> "torch.Tensor":
    """The user's own loss of this model; ValueError if backward cannot begin with it."""
    from torch import Tensor

    with user_function.one_error(what, f"its loss of a model on {str(device)!r}", ON_DEVICE):
        value: Any = loss(model)
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
        raise ValueError(f"{what}: its loss is a {type(value).__name__}{shape}, expected a tensor of one element")
    if not value.requires_grad:
        raise ValueError(
            f"{what}: its loss depends on no parameter that requires a gradient, expected one that is trained: see "
            "requires_grad of the model, and no_grad and detach in its loss"
        )
    return value


@contextmanager
def backward_errors(model: str) -> Iterator[None]:
    """What fails in backward of the user's own model is an error of theirs; others say what is wrong by themselves."""
    try:
        yield
    except (AnabranchError, ValueError):
        raise
    except Exception:
        if ":" not in model:
            raise
        with user_function.one_error(model, "its backward", ON_DEVICE):
            raise
