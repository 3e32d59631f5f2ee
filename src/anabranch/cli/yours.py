"""A function of the user's own, named on the command line as module:function."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def function(what: str, expected: str) -> Callable[..., Any]:
    """The function; its module is looked for in the working directory too. ``expected`` is for those who err."""
    module_name, _, name = what.partition(":")
    sys.path.insert(0, str(Path.cwd()))  # for good: the function may import more of what lies there
    try:
        module = import_module(module_name)
    except (ImportError, ValueError) as error:  # ValueError: an empty name
        raise ValueError(f"{what}: cannot import {module_name!r} ({error}); expected {expected}") from error
    found: Any = getattr(module, name, None)
    if not callable(found):
        seen = f"its {name!r} is of type {type(found).__name__}" if found is not None else "not there"
        raise ValueError(f"{what}: no function {name!r} in {module.__file__} ({seen}); expected {expected}")
    return found  # type: ignore[no-any-return]


def kinds_of(made: object) -> str:
    """What it returned, for an error."""
    return ", ".join(type(part).__name__ for part in made) if isinstance(made, tuple) else type(made).__name__
