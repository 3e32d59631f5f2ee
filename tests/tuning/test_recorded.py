"""Trainings that were recorded under the loop of the second edition: tuned again, they lead to the same choices."""

import os
from typing import Any

from ranks import on_ranks
from tuning import recorded


def replayed(rank: int) -> dict[str, list[list[Any]]]:
    os.environ["ANABRANCH_TRACE"] = ""
    return {path.stem: recorded.replay(recorded.load(path)) for path in sorted(recorded.FOLDER.glob("*.json"))}


def test_recorded_trainings_lead_to_the_same_choices() -> None:
    (found,) = on_ranks(replayed, 1)
    assert len(found) >= 19
    for name, choices in found.items():
        for was, now in zip(recorded.load(recorded.FOLDER / f"{name}.json")["choices"], choices, strict=True):
            assert now == was, name
