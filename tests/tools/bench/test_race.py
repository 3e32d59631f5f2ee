"""The race: everyone runs equally often, warmed up, in a fair order."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch

from anabranch.tools.bench import race as races
from anabranch.tools.bench.contestants import Contestant
from anabranch.tools.bench.race import Turn, card_nbytes, cards_count_all, race, ranks_per_host
from anabranch.tools.report.documents import BASELINE
from ranks import on_ranks


def turns_and_order() -> dict[str, list[str]]:
    events: list[str] = []

    def contestant(name: str, warmup: int) -> Contestant:
        @contextmanager
        def enter() -> Iterator[Callable[[], None]]:
            events.append(f"enter {name}")
            yield lambda: events.append(name)
            events.append(f"leave {name}")

        return Contestant(name, enter, warmup=warmup)

    field = [contestant("a", 0), contestant("b", 5), contestant("c", 1)]
    turns = list(race(field, iters=3, batches=2, warmup=1, device=torch.device("cpu")))
    assert all(turn.seconds >= 0 and turn.card_nbytes >= 0 for turn in turns)
    return {"turns": [turn.name for turn in turns], "events": events}


def slowest(rank: int) -> list[float]:
    @contextmanager
    def enter() -> Iterator[Callable[[], None]]:
        yield lambda: sleep(0.05 * rank)

    return [turn.seconds for turn in race([Contestant("a", enter, warmup=0)], 1, 2, 0, torch.device("cpu"))]


def passing(rank: int, folder: str) -> list[float]:
    """Rank 1's card sends 600 bytes a step and receives 100; rank 0's receives 200."""
    races.COUNTERS = Path(folder, str(rank))
    steps = 0

    @contextmanager
    def enter() -> Iterator[Callable[[], None]]:
        def step() -> None:
            nonlocal steps
            steps += 1
            received, sent = (200 - 100 * rank) * steps, 600 * rank * steps
            races.COUNTERS.write_text(f"\n\neth0: {received} 0 0 0 0 0 0 0 {sent} 0 0 0 0 0 0 0\n")

        step()
        yield step

    return [turn.card_nbytes for turn in race([Contestant("a", enter, warmup=0)], 1, 3, 0, torch.device("cpu"))]


def sizes() -> list[int]:
    """Ranks per host, of two ranks, by what the launcher says."""
    found = []
    for said in ("2", "1", "", "3", "0"):
        os.environ["LOCAL_WORLD_SIZE"] = said
        found.append(ranks_per_host())
    return found


def scenarios(rank: int, folder: str) -> dict[str, Any]:
    return {"turns": turns_and_order(), "slowest": slowest(rank), "passed": passing(rank, folder), "sizes": sizes()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(scenarios, 2, str(tmp_path_factory.mktemp("cards")))


def test_every_contestant_has_its_turns_and_every_round_begins_with_another(found: list[dict[str, Any]]) -> None:
    told, other = (one["turns"] for one in found)
    assert told == other
    assert told["turns"] == ["a", "b", "c", "b", "a", "c", "c", "a", "b"]
    before = {(one, other) for one, other in pairwise(told["turns"]) if one != other}
    assert all(len({one for one, other in before if other == name}) > 1 for name in "abc")  # none follows one only
    steps = Counter(told["events"])
    assert (steps["a"], steps["b"], steps["c"]) == (3 * (1 + 2), 3 * (5 + 2), 3 * (1 + 2))
    assert steps["enter a"] == steps["leave a"] == 3


def test_a_turn_takes_what_the_slowest_rank_took_and_cards_pass_their_mean(
    found: list[dict[str, Any]],
) -> None:
    (first,), (second,) = (one["slowest"] for one in found)
    assert first == second >= 0.05
    assert [one["passed"] for one in found] == [[400.0], [400.0]]


def test_hosts_have_as_many_ranks_as_the_launcher_says(found: list[dict[str, Any]]) -> None:
    assert [one["sizes"] for one in found] == [[2, 1, 1, 1, 1]] * 2


def test_cards_are_believed_if_they_saw_ddp_send_its_gradients() -> None:
    assert cards_count_all([Turn(BASELINE, 0.1, 1e6), Turn(BASELINE, 0.1, 9e6), Turn(BASELINE, 0.1, 0.0)], 1_000_000)
    assert not cards_count_all([Turn(BASELINE, 0.1, 900.0)], 1_000_000)


# Two lines of headings; of the sixteen numbers of a card the first is what it received and the ninth what it sent.
CARDS = """
 face |bytes ...
    lo:  900 2 0 0 0 0 0 0  900 2 0 0 0 0 0 0
  eth0:123456789012 2 0 0 0 0 0 0  700 3 0 0 0 0 0 0
  eth1:  164 2 0 0 0 0 0 0   21 1 0 0 0 0 0 0
"""


def test_bytes_are_those_that_cards_count_but_for_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(races, "COUNTERS", tmp_path / "dev")
    assert card_nbytes() == (0, 0)  # another system
    (tmp_path / "dev").write_text(CARDS)
    assert card_nbytes() == (123456789176, 721)
