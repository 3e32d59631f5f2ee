"""The frozen values of a sharded step: what they refuse, and their files."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import anabranch as ab
from anabranch import FileError, PlanError
from anabranch.fsdp.planning import Block, ShardedTrace, ShardingPlan, Unit, load, save

TRACE = ShardedTrace((Block("a", 8, 8, 1.0, 2.0), Block("b", 4, 0, 0.5, 0.25)), 2, 2, 0.1, 0.2, 0.3, {"model": "tiny"})


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Block("", 1, 1, 1.0, 1.0), "empty name"),
        (lambda: Block("a", -1, 1, 1.0, 1.0), "a: its parameters has -1 bytes"),
        (lambda: Block("a", 1, 1, -1.0, 1.0), "a: forward_s is -1.0"),
        (lambda: ShardedTrace(()), "no blocks"),
        (lambda: ShardedTrace((TRACE.blocks[0],) * 2), "a is in the trace twice"),
        (lambda: ShardedTrace(TRACE.blocks, update_s=float("nan")), "update_s is nan"),
        (lambda: Unit(()), "no names"),
        (lambda: Unit(("a", "")), "a unit has an empty name"),
        (lambda: ShardingPlan(()), "no units"),
        (lambda: ShardingPlan((Unit(("a",)), Unit(("a",)))), "a is in 2 places"),
        (lambda: ShardingPlan((Unit(("a",)),), 0), "prefetch is 0"),
        (lambda: ShardingPlan.from_cuts(["a", "b"], [2]), "cuts are \\[2\\]"),
    ],
)
def test_nonsense_is_refused(build: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build()


def test_a_plan_in_another_order_is_refused() -> None:
    with pytest.raises(PlanError, match="the plan has b where the trace has a"):
        ShardingPlan.per_block(["b", "a"]).check(TRACE)


def test_times_can_be_replaced() -> None:
    assert TRACE.with_times(TRACE.times) == TRACE
    assert TRACE.with_times([0, 0, 0, 1, 2, 3, 4]).blocks[1].backward_s == 4


def test_files_read_back_the_same(tmp_path: Path) -> None:
    plan = ShardingPlan((Unit(("a",), False), Unit(("b",))), 3)
    save(TRACE, tmp_path / "trace.json")
    save(plan, tmp_path / "plan.json")
    assert load(ShardedTrace, tmp_path / "trace.json") == TRACE
    assert load(ShardingPlan, tmp_path / "plan.json") == plan
    with pytest.raises(FileError, match="already there"):
        save(plan, tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"sharded_trace"', '"sharded"', "'format' is 'sharded', expected one of trace, .*, sharding_plan"),
        ('"nbytes": 8', '"nbytes": -8', "its parameters has -8 bytes"),
        ('"loss_s": 0.2', '"loss_s": "0.2"', "loss_s"),
        ('"loss_s"', '"lost_s"', "lost_s"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, old: str, new: str, words: str) -> None:
    save(TRACE, tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert old in text
    (tmp_path / "trace.json").write_text(text.replace(old, new, 1))
    with pytest.raises(FileError, match=words) as caught:
        load(ShardedTrace, tmp_path / "trace.json")
    assert "trace.json" in str(caught.value)


def test_a_plan_in_words() -> None:
    assert ShardingPlan.per_block(["a", "b"]).described() == "2 units, 2 freed after forward, 1 gathered ahead"
    assert ShardingPlan.from_cuts(["a", "b"], []).described() == "1 unit, 0 freed after forward, 1 gathered ahead"


def test_every_save_knows_every_noun(tmp_path: Path) -> None:
    nouns: list[Any] = [TRACE, ShardingPlan.per_block(["a"]), ab.Plan((ab.Bucket(("a",)),))]
    for number, (noun, saved) in enumerate(product(nouns, (ab.save, ab.sharded.save))):
        saved(noun, tmp_path / f"{number}.json")
        assert ab.load(tmp_path / f"{number}.json") == noun


def test_a_file_of_another_noun_is_refused(tmp_path: Path) -> None:
    save(TRACE, tmp_path / "trace.json")
    with pytest.raises(FileError, match=r"trace\.json: holds a sharded trace, expected a sharding plan"):
        load(ShardingPlan, tmp_path / "trace.json")
