"""The race: everyone runs equally often, warmed up, in a fair order."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from anabranch.bench.contestants import Contestant
from anabranch.bench.race import race
from ranks import on_ranks


def turns_and_order(rank: int) -> dict[str, list[str]]:
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
    assert all(seconds >= 0 for _, seconds in turns)
    return {"turns": [name for name, _ in turns], "events": events}


def test_every_contestant_has_its_turns_and_every_round_begins_with_another() -> None:
    told, other = on_ranks(turns_and_order, 2)
    assert told == other
    assert told["turns"] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    steps = Counter(told["events"])
    assert (steps["a"], steps["b"], steps["c"]) == (3 * (1 + 2), 3 * (5 + 2), 3 * (1 + 2))
    assert steps["enter a"] == steps["leave a"] == 3


def slowest(rank: int) -> list[float]:
    import time

    @contextmanager
    def enter() -> Iterator[Callable[[], None]]:
        yield lambda: time.sleep(0.05 * rank)

    return [seconds for _, seconds in race([Contestant("a", enter, warmup=0)], 1, 2, 0, torch.device("cpu"))]


def test_a_turn_takes_what_the_slowest_rank_took() -> None:
    (first,), (second,) = on_ranks(slowest, 2)
    assert first == second >= 0.05
