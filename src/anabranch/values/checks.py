"""Checks that values share: finite times and sizes, and meta that any JSON reader understands."""

from collections import Counter
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, Never, Self

Scalar = str | int | float | bool | None
Meta = Mapping[str, Scalar]

MAX_SECONDS = 1e9  # sums of such numbers stay finite
MAX_NBYTES = 1 << 53

# How files.py validates a value, and the dataclasses in it, which inherit it from pydantic 2.10.1 on: nothing unknown,
# nothing converted, nothing infinite.
STRICT = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


class ReadOnly(dict[str, Any]):
    """A dict that cannot be changed but, unlike a mapping proxy, can be copied and pickled."""

    def _refuse(self, *args: object, **kwargs: object) -> Never:  # noqa: ARG002
        raise TypeError("this mapping belongs to a frozen value: build a new one with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[Self], tuple[dict[str, Any]]]:
        return type(self), (dict(self),)


def frozen_meta(meta: Mapping[str, Any]) -> Meta:
    """A read-only copy of ``meta``, refused unless it maps strings to finite JSON scalars."""
    for key, value in meta.items():
        if not isinstance(key, str) or not isinstance(value, str | int | float | bool | None):
            raise ValueError(f"meta[{key!r}] is {value!r}: meta maps strings to text, numbers, booleans or None")
        if isinstance(value, float) and not isfinite(value):
            raise ValueError(f"meta[{key!r}] is {value}: a number in meta must be finite")
    return ReadOnly(meta)


NO_META: Meta = ReadOnly()


def repeated(names: Iterable[str]) -> str | None:
    """The first of the names that is there more than once; None where each is there once."""
    return next((name for name, times in Counter(names).items() if times > 1), None)


def check_seconds(what: str, value: float) -> None:
    """Refuse a duration, or a cost per byte, that is negative, beyond thirty years or not a number."""
    if not 0 <= value <= MAX_SECONDS:
        raise ValueError(f"{what} is {value}: expected a number from 0 to {MAX_SECONDS:g}")


def check_nbytes(what: str, value: int) -> None:
    """Refuse a size that is negative or that a float could not hold exactly."""
    if not 0 <= value <= MAX_NBYTES:
        raise ValueError(f"{what} has {value} bytes: expected 0 to 2**53")


def check_positive(what: str, value: float) -> None:
    """Refuse a factor that is not a finite number above zero."""
    if not (isfinite(value) and value > 0):
        raise ValueError(f"{what} is {value}: expected a finite number above zero")
