"""Several scenarios in one launch of ranks, one after another."""

from collections.abc import Callable, Iterable
from typing import Any

from ranks import on_ranks


def each_on_ranks(
    function: Callable[..., Any], world_size: int, scenarios: Iterable[tuple[Any, ...]], timeout_s: float = 60.0
) -> list[list[Any]]:
    """By scenario, what ``function(rank, *scenario)`` returns on each rank; an error names the scenario."""
    answers = on_ranks(_each, world_size, function, list(scenarios), timeout_s=timeout_s)
    return [list(of_ranks) for of_ranks in zip(*answers, strict=True)]


def _each(rank: int, function: Callable[..., Any], scenarios: list[tuple[Any, ...]]) -> list[Any]:
    found = []
    for scenario in scenarios:
        try:
            found.append(function(rank, *scenario))
        except BaseException as error:
            error.add_note(f"in the scenario {scenario!r}")
            raise
    return found
