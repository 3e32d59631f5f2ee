"""A function of the user's own, named on the command line as module:function."""

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def load_function(what: str, expected: str) -> Callable[..., Any]:
    """The function ``module:function``; modules in the working directory are found, too. Errors say ``expected``."""
    module_name, _, name = what.partition(":")
    sys.path.insert(0, str(Path.cwd()))  # stays there: the function may import more modules from it
    try:
        module = import_module(module_name)
    except (ImportError, ValueError) as error:  # ValueError: an empty name
        raise ValueError(f"{what}: cannot import {module_name!r} ({error}); expected {expected}") from error
    found: Any = getattr(module, name, None)
    if not callable(found):
        seen = f"its {name!r} is of type {type(found).__name__}" if found is not None else "not there"
        raise ValueError(f"{what}: no function {name!r} in {module.__file__} ({seen}); expected {expected}")
    return found  # type: ignore[no-any-return]


def check_call(what: str, name: str, call: Callable[..., Any]) -> None:
    """Refuse a function that needs arguments before it is called; a builtin without a signature is accepted."""
    try:
        inspect.signature(call).bind()
    except TypeError as error:
        raise ValueError(f"{what}: its {name} cannot be called as {name}(): {error}; expected one that can") from error
    except ValueError:
        pass


def check_returned(what: str, made: Any, second: str) -> "tuple[nn.Module, Callable[..., Any]]":
    """``made``, if it is a pair of a model and a function; ``second`` describes the function in the error."""
    from torch import nn

    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1]):
        return made
    kinds = ", ".join(type(part).__name__ for part in made) if isinstance(made, tuple) else type(made).__name__
    raise ValueError(f"{what}: returned ({kinds}), expected (model, {second}")
