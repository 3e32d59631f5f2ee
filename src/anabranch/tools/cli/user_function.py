"""A function of the user's own, named on the command line as module:function.

Whatever it does wrong is one error that names it: main() prints a ValueError as a line.
"""

import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

import anabranch

if TYPE_CHECKING:
    from torch import nn

MOST_LETTERS = 300  # of what somebody else's error says


def load_function(what: str, expected: str) -> Callable[..., Any]:
    """The function ``module:function``; modules in the working directory are found, too. Errors say ``expected``."""
    module_name, _, name = what.partition(":")
    sys.path.insert(0, str(Path.cwd()))  # stays there: the function may import more modules from it
    try:
        module = import_module(module_name)
    except (ImportError, ValueError) as error:  # ValueError: an empty name
        raise ValueError(f"{what}: cannot import {module_name!r} ({error}); expected {expected}") from error
    except (Exception, SystemExit) as error:  # a module may do anything as it is imported
        raise ValueError(f"{what}: importing {module_name!r} {_raised(error)}; expected {expected}") from error
    found: Any = getattr(module, name, None)
    if not callable(found):
        seen = f"its {name!r} is of type {type(found).__name__}" if found is not None else "not there"
        where = getattr(module, "__file__", None) or module_name
        raise ValueError(f"{what}: no function {name!r} in {where} ({seen}); expected {expected}")
    return found  # type: ignore[no-any-return]


@contextmanager
def one_error(what: str, doing: str, expected: str) -> Iterator[None]:
    """A context for calls of the user's code: what is raised in it is one ValueError, which says where that was."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{what}: {doing} {_raised(error)}; expected {expected}; call it in Python for the whole traceback"
        ) from error


def check_call(what: str, name: str, call: Callable[..., Any], *arguments: str) -> None:
    """Refuse a function that cannot be called with these arguments; a builtin without a signature is accepted."""
    try:
        inspect.signature(call).bind(*arguments)
    except TypeError as error:
        called = f"{name}({', '.join(arguments)})"
        raise ValueError(f"{what}: its {name} cannot be called as {called}: {error}; expected one that can") from error
    except ValueError:
        pass


def check_returned(what: str, made: Any, second: str) -> "tuple[nn.Module, Callable[..., Any]]":
    """``made``, if it is a pair of a model and a function; ``second`` describes the function in the error."""
    from torch import nn

    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1]):
        return made
    kinds = ", ".join(type(part).__name__ for part in made) if isinstance(made, tuple) else type(made).__name__
    raise ValueError(f"{what}: returned ({kinds}), expected (model, {second}")


def _raised(error: BaseException) -> str:
    """What was raised, where in the user's own files, and what it says, as the middle of a sentence."""
    said = " ".join(str(error).split())
    said = f": {said[:MOST_LETTERS]}{'…' * (len(said) > MOST_LETTERS)}" if said else ""
    return f"raised {type(error).__name__}{_place(error)}{said}"


def _place(error: BaseException) -> str:
    """The last line of a traceback that is neither Python's, nor of an installed library, nor ours."""
    paths = sysconfig.get_paths()
    others = [*(Path(paths[name]) for name in ("stdlib", "purelib", "platlib")), Path(anabranch.__file__).parent]
    own = [
        frame
        for frame in extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and not any(Path(frame.filename).is_relative_to(other) for other in others)
    ]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
