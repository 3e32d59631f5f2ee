"""Optional libraries: a clear error where one is missing that an extra of this package brings."""

import sys
from collections.abc import Sequence
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
