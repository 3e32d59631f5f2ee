"""Names of ways to shard: each stands for one way, and what stands for none is refused."""

import pytest

from anabranch.fsdp.planning.ways import RESHARD, UNPLANNED, WAYS, help_of, way_of

COMPRESSED = ["hsdp@int8", "hsdp:reshard@bf16", "hsdp:planned@oktopk:0.01"]


@pytest.mark.parametrize("name", [*WAYS, *COMPRESSED])
def test_a_name_is_that_of_its_way(name: str) -> None:
    way = way_of(name)
    assert way.name == name and way.nodes == name.startswith("hsdp") and (way.units == RESHARD) == (RESHARD in name)
    assert way.exchange == (name.partition("@")[2] or "dense")


def test_titles_tell_all_ways_apart() -> None:
    titles = [way_of(name).title for name in (*WAYS, *COMPRESSED)]
    assert len(set(titles)) == len(titles)
    assert way_of("hsdp@int8").title == "HSDP, a unit per block, kept after forward, int8 between nodes"


def test_units_are_kept_or_freed_as_the_name_says() -> None:
    assert [unit.reshard for unit in way_of("hsdp:reshard").per_block(["a", "b"]).units] == [True, True]
    assert [unit.reshard for unit in way_of("fsdp2").per_block(["a", "b"]).units] == [False, False]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zero3", "--sharded is 'zero3': expected one of fsdp2, fsdp2:reshard, fsdp2:planned, hsdp"),
        ("fsdp2@int8", "expected, for another exchange between nodes, hsdp and one of bf16, int8, int4"),
        ("hsdp@int9", "such as hsdp@int8"),
        ("hsdp@oktopk", "or oktopk with a density"),
        ("hsdp@oktopk:2", "or oktopk with a density"),
        ("hsdp@oktopk:0.0", "or oktopk with a density"),
        ("hsdp@oktopk:0.01:bf16", "or oktopk with a density"),
        ("hsdp@", "such as hsdp@int8"),
    ],
)
def test_what_is_no_way_is_refused(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        way_of(name)


def test_a_command_may_know_some_ways_only() -> None:
    assert way_of("hsdp@int8", UNPLANNED).exchange == "int8"
    with pytest.raises(ValueError, match="expected one of fsdp2, fsdp2:reshard, hsdp, hsdp:reshard"):
        way_of("hsdp:planned@int8", UNPLANNED)
    assert "fsdp2:planned" not in help_of(UNPLANNED) and "hsdp:reshard (HSDP, a unit per block, freed" in help_of(WAYS)
