"""Optional libraries: a clear error where one is missing that an extra of this package brings."""

import sys
from importlib.util import find_spec

from anabranch.errors import MissingExtraError


def require(library: str, extra: str | None, what: str, pin: str = "") -> None:
    """Raise MissingExtraError unless ``library`` is installed; nothing is imported.

    Call it before the import of an optional library, as early as its need is known. ``what`` names the command or
    feature that needs the library, ``extra`` the extra that brings it, or None if no extra does. ``pin`` is a
    requirement to give pip beside the extra, such as "torch==2.11.0" where pip would otherwise replace the installed
    torch.
    """
    if sys.modules.get(library) is None and find_spec(library) is None:
        requirements = (library if extra is None else f"'anabranch[{extra}]'") + (f" '{pin}'" if pin else "")
        raise MissingExtraError(
            f"{what} needs {library}, which is not installed: pip install {requirements}", name=library
        )
