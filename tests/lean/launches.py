"""Scenarios in one launch of ranks: several of a file, or one with several arguments."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ranks import cases_on_ranks

Answers = Mapping[str, list[Any]]  # by scenario: what it returned on each rank


def each_on_ranks(
    function: Callable[..., Any], world_size: int, scenarios: Iterable[tuple[Any, ...]], timeout_s: float = 60.0
) -> list[list[Any]]:
    """By scenario, what ``function(rank, *scenario)`` returns on each rank; an error names the scenario."""
    cases = {f"{function.__name__}{scenario}": (function, *scenario) for scenario in scenarios}
    return list(cases_on_ranks(cases, world_size, timeout_s).values())
