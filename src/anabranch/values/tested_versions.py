"""Functions and attributes of other packages that anabranch uses, and that other versions of them may not have."""

import inspect
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version


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
