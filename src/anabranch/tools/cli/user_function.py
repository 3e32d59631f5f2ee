"""A function of the user's own, named on the command line as module:function.

Whatever it does wrong is one error that names it: main() prints a ValueError as a line.
"""

import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

import anabranch
from anabranch.values.errors import AnabranchError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from anabranch.tools.predict.memory.estimator import BuildAt
    from anabranch.tools.predict.memory.probe import Loss

MOST_LETTERS = 300  # of what somebody else's error says
RECORDED = "a function of yours as module:function, such as train:setup"
BUILT = "module:function, where function(batch, device) returns a model and its loss as a function of the model"
ON_DEVICE = (
    "one that runs on the device that the function was given, with inputs made there; 'meta' has tensors without data, "
    "whose values cannot be asked for"
)


def load_function(what: str, expected: str) -> Callable[..., Any]:
    """The function ``module:function``; modules in the working directory are found, too. Errors say ``expected``."""
    module_name, _, name = what.partition(":")
    sys.path.insert(0, str(Path.cwd()))  # stays there: the function may import more modules from it
    with _one_error(what, f"importing {module_name!r}", expected):
        module = import_module(module_name)
    found: Any = getattr(module, name, None)
    if not callable(found):
        seen = f"its {name!r} is of type {type(found).__name__}" if found is not None else "not there"
        where = getattr(module, "__file__", None) or module_name
        raise ValueError(f"{what}: no function {name!r} in {where} ({seen}); expected {expected}")
    return found  # type: ignore[no-any-return]


def model_and_step(what: str) -> "tuple[nn.Module, Callable[[], object]]":
    """For anabranch record: the model and the step that the user's function makes."""
    function, name = load_function(what, RECORDED), what.partition(":")[2]
    with _one_error(what, f"{name}()", "a function that returns (model, step)"):
        made = function()
    model, step = _check_returned(what, made, "step): a torch module and a function")

    def one_step() -> None:
        with _one_error(what, "its step()", "one that runs a forward and a backward, however often"):
            step()

    return model, one_step


def build_at(what: str) -> "BuildAt":
    """For anabranch memory: by batch, what the user's function makes; ValueError if that cannot be trained."""
    function, name = load_function(what, BUILT), what.partition(":")[2]

    def made(batch: int, device: "torch.device") -> "tuple[nn.Module, Loss]":
        with _one_error(what, f"{name}({batch}, {str(device)!r})", BUILT):
            returned = function(batch, device)
        model, loss = _check_returned(what, returned, "loss): a torch module and a function of it")
        for key, parameter in model.named_parameters():
            if parameter.device.type != device.type:
                raise ValueError(
                    f"{what}: {key} of its model is on {parameter.device}, expected on {device}, the device that "
                    f"{name} was given: make the model in it, with device=device"
                )
        return model, partial(_loss, what, loss, device)

    return lambda batch: partial(made, batch)


@contextmanager
def backward_errors(model: str) -> Iterator[None]:
    """A context for backward passes: what fails in one of the user's own model is one ValueError that says where."""
    try:
        yield
    except (AnabranchError, ValueError):  # ours, which say what is wrong
        raise
    except Exception:
        if ":" not in model:
            raise
        with _one_error(model, "its backward", ON_DEVICE):
            raise


def _loss(what: str, loss: "Loss", device: "torch.device", model: "nn.Module") -> "torch.Tensor":
    """The user's loss of this model; ValueError if backward cannot begin with it."""
    from torch import Tensor

    with _one_error(what, f"its loss of a model on {str(device)!r}", ON_DEVICE):
        value: Any = loss(model)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        found = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            found = f"a tensor of shape {list(value.shape)} with requires_grad={value.requires_grad}"
        raise ValueError(f"{what}: its loss is {found}, expected one number that depends on a trained parameter")
    return value


@contextmanager
def _one_error(what: str, doing: str, expected: str) -> Iterator[None]:
    """A context for calls of the user's code: what is raised in it is one ValueError, which says where that was."""
    try:
        yield
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split())
        said = f": {said[:MOST_LETTERS]}{'…' * (len(said) > MOST_LETTERS)}" if said else ""
        raise ValueError(
            f"{what}: {doing} raised {type(error).__name__}{_place(error)}{said}; expected {expected}; call it in "
            "Python for the whole traceback"
        ) from error


def _check_returned(what: str, made: Any, second: str) -> "tuple[nn.Module, Callable[..., Any]]":
    """``made``, if it is a pair of a model and a function; ``second`` describes the function in the error."""
    from torch import nn

    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1]):
        return made
    kinds = ", ".join(type(part).__name__ for part in made) if isinstance(made, tuple) else type(made).__name__
    raise ValueError(f"{what}: returned ({kinds}), expected (model, {second}")


def _place(error: BaseException) -> str:
    """The last line of a traceback that is neither Python's, nor of an installed library, nor ours."""
    paths = sysconfig.get_paths()
    others = [*(Path(paths[name]) for name in ("stdlib", "purelib", "platlib")), Path(anabranch.__file__).parent]
    for frame in reversed(extract_tb(error.__traceback__)):
        if not frame.filename.startswith("<") and not any(map(Path(frame.filename).is_relative_to, others)):
            return f" at {frame.filename}:{frame.lineno}"
    return ""
