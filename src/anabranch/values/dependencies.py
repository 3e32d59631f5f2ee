"""Other packages: clear errors where one is missing, or has another version than anabranch is tested with.

Other versions may not have the functions and attributes that anabranch uses, many of them private.
"""

import inspect
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from anabranch.values.errors import MissingExtraError


def require(library: str, extra: str | None, what: str, pin: str = "") -> None:
    """Raise MissingExtraError unless ``library`` is installed; nothing is imported.

    Call it before the import of an optional library, as early as its need is known. ``what`` names the command or
    feature that needs the library, ``extra`` the extra that brings it, or None if no extra does. ``pin`` is a
    requirement to give pip with the extra, such as "torch==2.11.0" where pip would otherwise replace the installed
    torch.
    """
    if sys.modules.get(library) is None and find_spec(library) is None:
        requirements = (library if extra is None else f"'anabranch[{extra}]'") + (f" '{pin}'" if pin else "")
        raise MissingExtraError(
            f"{what} needs {library}, which is not installed: pip install {requirements}", name=library
        )


def require_version(library: str, found: str, tested: Sequence[str], what: str) -> None:
    """Raise MissingExtraError unless the version ``found`` belongs to one of the ``tested`` series, such as "2.6".

    For libraries whose private names are used, which may change from one series to the next.
    """
    if not any(f"{found}.".startswith(f"{series}.") for series in tested):
        raise MissingExtraError(
            f"{what} was tested with {library} {', '.join(tested)}, and {found} is installed: "
            f"pip install '{library}=={tested[-1]}.*'",
            name=library,
        )


def check_signatures(package: str, tested: str, owner: object, signatures: Mapping[str, Sequence[str]]) -> None:
    """Raise RuntimeError unless ``owner`` has each of these functions, with arguments of these names.

    package      the package that ``owner``, an object or a module, is from
    tested       the version of it that anabranch is tested with
    signatures   the names of arguments by name of function
    """
    where = getattr(owner, "__name__", type(owner).__name__)
    for name, arguments in signatures.items():
        method = getattr(owner, name, None)
        if not callable(method):
            raise unsupported(package, tested, f"{where} has no {name}()")
        for argument in arguments:
            if argument not in inspect.signature(method).parameters:
                raise unsupported(package, tested, f"{where}.{name}() takes no {argument}")


def check_parts(package: str, tested: str, owner: object, parts: Sequence[str]) -> None:
    """RuntimeError unless ``owner``, an object of this package's, has each of these attributes."""
    for name in parts:
        if not hasattr(owner, name):
            raise unsupported(package, tested, f"{type(owner).__name__} has no {name}")


def unsupported(package: str, tested: str, what: str) -> RuntimeError:
    """Returns the error that says what is different in the installed version of a package."""
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "of an unknown version"
    return RuntimeError(
        f"anabranch does not fit {package} {found}: {what}; it is tested with {tested}: pip install {package}=={tested}"
    )
