"""The parts of a reproduction: published figures, ours beside them, and why they differ."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

AGREES = "agrees"
OURS_ALONE = "ours alone"
WITHIN = 0.10  # relative difference up to which figures agree: as much as repeated measurements may differ


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a table, as published and as this project gets it; None where there is none."""

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


class Reasons(NamedTuple):
    """Why our figure is lower, or higher, than the published one, where the two do not agree."""

    lower: str
    higher: str

    def compare(self, case: str, what: str, unit: str, published: float | None, ours: float) -> Figure:
        """The two figures with a word on their ratio: agreement, or the reason for the difference."""
        if published is None:
            return Figure(case, what, unit, None, ours, OURS_ALONE)
        if abs(ours / published - 1) <= WITHIN:
            word = AGREES
        else:
            word = f"lower: {self.lower}" if ours < published else f"higher: {self.higher}"
        return Figure(case, what, unit, published, ours, word)


@dataclass(frozen=True, slots=True)
class Section:
    """One table: its title, the source of the published figures, how ours were made, and notes.

    ``against`` is the heading of the column that ours are compared with.
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
        """The figures of all sections."""
        for section in self.sections:
            yield from section.figures

    def document(self) -> dict[str, Any]:
        """The JSON document: every figure with its ratio and with how ours was made."""
        return {"paper": self.paper, "sections": [_section(section) for section in self.sections]}


def range_text(values: Sequence[float]) -> str:
    """The smallest and the largest value, for a sentence: 1.00 to 3.00."""
    return f"{min(values):.2f} to {max(values):.2f}"


def _section(section: Section) -> dict[str, Any]:
    rows = [{**asdict(figure), "ratio": figure.ratio, "how": section.how} for figure in section.figures]
    return {**asdict(section), "figures": rows}
