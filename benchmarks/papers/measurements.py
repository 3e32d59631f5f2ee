"""This project's own measurements, as they ship with the package: figures of the reports in benchmarks/.

``measurements.json`` repeats a few cells of those reports, each with its place there. A test compares the two.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

FILE = "measurements.json"


@dataclass(frozen=True, slots=True)
class ReportCell:
    """One number of a report's table; ``section`` is the beginning of a heading, empty for the first table of all."""

    section: str
    row: str
    column: str
    value: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """The figures of one report, with what they were measured on; ``source`` is its path in the repository."""

    source: str
    date: str
    hardware: str
    network: str
    versions: str
    figures: Mapping[str, ReportCell]

    def value(self, name: str) -> float:
        """The figure of this name."""
        return self.figures[name].value

    @property
    def conditions(self) -> str:
        """Where and when it was measured, in one line."""
        return f"{self.hardware}; {self.network}; {self.versions}; {self.date}"


def measurements() -> dict[str, Measurements]:
    """All measurements in the package, by the short name of their report."""
    text = (resources.files("benchmarks.papers") / FILE).read_text(encoding="utf-8")
    return {name: _from_json(fields) for name, fields in json.loads(text).items()}


def _from_json(fields: dict[str, Any]) -> Measurements:
    cells = {name: ReportCell(**cell) for name, cell in fields.pop("figures").items()}
    return Measurements(**fields, figures=cells)
