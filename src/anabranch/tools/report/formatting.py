"""Values as short text: numbers with a suitable unit, names without control characters."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import floor, log10

from rich.text import Text

from anabranch.values.files import plain as plain  # for the reports

MAX_NAME = 60


@dataclass(frozen=True, slots=True)
class Scale:
    """One unit and one number of decimals for a whole column of times."""

    unit: str
    per_second: float
    decimals: int

    def __call__(self, value_s: float, /) -> str:
        return f"{value_s * self.per_second:.{self.decimals}f}"


def time_scale(values_s: Iterable[float]) -> Scale:
    """The unit that suits the largest of these times, with enough decimals for the smallest."""
    sizes_s = [abs(value) for value in values_s if value] or [0.0]
    # A column is easier to read as 64.2 and 4172.3 ms than as 0.0642 and 4.1723 s: hence ten of a unit, not one.
    unit, per_second = _unit(max(sizes_s) / 10)
    smallest = min(sizes_s) * per_second
    whole = 1 + floor(log10(smallest)) if smallest >= 1 else 1
    return Scale(unit, per_second, min(3, max(1, 4 - whole)))


def seconds(value_s: float) -> str:
    """One time with its unit and four digits: 12.34 ms."""
    unit, per_second = _unit(abs(value_s))
    value = value_s * per_second
    whole = 1 + floor(log10(abs(value))) if abs(value) >= 1 else 1
    return f"{value:.{min(3, max(0, 4 - whole))}f} {unit}"


def _unit(size_s: float) -> tuple[str, float]:
    return ("s", 1.0) if size_s >= 1 else ("ms", 1e3) if size_s >= 1e-3 else ("µs", 1e6)


def size(nbytes: int) -> str:
    """A number of bytes with a binary unit: 25.0 MiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def bandwidth(nbytes: int, seconds: float) -> str:
    """What a message of ``nbytes`` that took ``seconds`` achieved, in Gbit/s; a dash where that is no number."""
    return f"{nbytes * 8e-9 / seconds:.3g} Gbit/s" if nbytes and seconds else "-"


def percent(share: float) -> str:
    """A share of one as a percentage; rounding noise around zero is zero."""
    return f"{max(share, 0.0):.1%}"


def signed_percent(share: float) -> str:
    """A relative difference as a percentage with its sign: +3.1 %."""
    return f"{share:+.1%}".replace("%", " %").replace("-0.0", "+0.0")


def factor(ratio: float | None) -> str:
    """How many times as fast: 1.25×; a dash for a comparison with nothing."""
    return "-" if ratio is None else f"{ratio:.2f}×" if ratio < 100 else f"{ratio:.0f}×"


def count(number: int, thing: str) -> str:
    """1 bucket, 2 buckets."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def shortened(text: str, longest: int) -> str:
    """A long text without its middle, which tells least of a parameter's name."""
    return text if len(text) <= longest else text[: longest // 2] + "…" + text[1 - longest // 2 :]


def label(text: str) -> Text:
    """A name from a file as a table cell: no markup, no control characters, its middle left out if very long."""
    return Text(shortened(plain(text), MAX_NAME), overflow="fold")
