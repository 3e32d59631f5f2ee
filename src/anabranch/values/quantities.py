"""Numbers with a unit, as people write them: 16GiB, 30us."""

import math
import re
from collections.abc import Mapping

SIZE_NBYTES: Mapping[str, float] = {"gib": 2.0**30, "mib": 2.0**20, "gb": 1e9, "mb": 1e6}
MAX_SIZE_NBYTES = 2.0**60  # more memory than any machine has

_NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?")


def quantity(text: str, units: Mapping[str, float]) -> float:
    """A number with one of these units, in the units' base; not a number (nan) where that is not what ``text`` is."""
    number = _NUMBER.match(text.lower())
    unit = text.lower()[number.end() :].strip().removesuffix("/s") if number else ""
    value = float(number.group()) if number else math.nan
    if unit in units:
        return value * units[unit]
    return value if not unit and value == 0 else math.nan  # zero is zero in every unit


def size_nbytes(what: str, text: str) -> int:
    """A size of memory in bytes, such as 16GiB; ValueError naming what it is for if it is none."""
    nbytes = quantity(text, SIZE_NBYTES) if not text.endswith("/s") else math.nan
    if not 1 <= nbytes <= MAX_SIZE_NBYTES:
        raise ValueError(f"{what} is {text!r}: expected a size in GiB, MiB, GB or MB, such as 16GiB")
    return int(nbytes)
