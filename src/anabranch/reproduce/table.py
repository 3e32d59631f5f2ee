"""What a reproduction is made of: published figures, ours beside them, and a plain word."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

AGREES = "agrees"
OURS_ALONE = "ours alone"
WITHIN = 0.10  # by how much figures may differ and still agree: what a second measurement of them might


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a table, as published and as this project gets it; None where one of the two has none."""

    case: str
    what: str
    unit: str
    published: float | None
    ours: float | None
    word: str

    @property
    def ratio(self) -> float | None:
        """Ours over the published one, where both are there."""
        if self.published is None or self.ours is None or not self.published:
            return None
        return self.ours / self.published


class Words(NamedTuple):
    """Why ours is lower, or higher, where the two do not agree."""

    lower: str
    higher: str

    def compare(self, case: str, what: str, unit: str, published: float | None, ours: float) -> Figure:
        """The two beside each other, with the word that their ratio deserves."""
        if published is None:
            return Figure(case, what, unit, None, ours, OURS_ALONE)
        if abs(ours / published - 1) <= WITHIN:
            word = AGREES
        else:
            word = f"lower: {self.lower}" if ours < published else f"higher: {self.higher}"
        return Figure(case, what, unit, published, ours, word)


@dataclass(frozen=True, slots=True)
class Section:
    """One table: what it shows, where the published figures stand, how ours came about, and what there is to say.

    ``against`` heads the column of what ours are compared with, where nobody has published it.
    """

    title: str
    source: str
    how: str
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()
    against: str = "published"


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A paper and its tables."""

    paper: str
    sections: tuple[Section, ...]

    def figures(self) -> Iterator[Figure]:
        """Of all sections."""
        for section in self.sections:
            yield from section.figures

    def document(self) -> dict[str, Any]:
        """For JSON: every figure with its ratio, and with how it came about."""
        return {"paper": self.paper, "sections": [_section(section) for section in self.sections]}


def span(values: Sequence[float]) -> str:
    """From the smallest to the largest, for a sentence."""
    return f"{min(values):.2f} to {max(values):.2f}"


def _section(section: Section) -> dict[str, Any]:
    rows = [{**asdict(figure), "ratio": figure.ratio, "how": section.how} for figure in section.figures]
    return {**asdict(section), "figures": rows}
