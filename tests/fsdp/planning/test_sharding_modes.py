"""Names of sharding modes: each is that of one mode, and other names are refused."""

import pytest

from anabranch.fsdp.planning.sharding_modes import RESHARD, SHARDING_MODES, UNPLANNED, help_of, sharding_mode

COMPRESSED = ["hsdp@int8", "hsdp:reshard@bf16", "hsdp:planned@oktopk:0.01"]


def test_a_name_is_that_of_its_mode() -> None:
    for name in (*SHARDING_MODES, *COMPRESSED):
        mode = sharding_mode(name)
        assert (mode.name, mode.nodes, mode.units == RESHARD) == (name, name.startswith("hsdp"), RESHARD in name)
        assert mode.exchange == (name.partition("@")[2] or "dense"), name


def test_titles_tell_all_modes_apart() -> None:
    titles = [sharding_mode(name).title for name in (*SHARDING_MODES, *COMPRESSED)]
    assert len(set(titles)) == len(titles)
    assert sharding_mode("hsdp@int8").title == "HSDP, a unit per block, kept after forward, int8 between nodes"


def test_units_are_kept_or_freed_as_the_name_says() -> None:
    assert [unit.reshard for unit in sharding_mode("hsdp:reshard").per_block(["a", "b"]).units] == [True, True]
    assert [unit.reshard for unit in sharding_mode("fsdp2").per_block(["a", "b"]).units] == [False, False]


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
def test_what_is_no_mode_is_refused(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sharding_mode(name)


def test_a_command_may_know_some_modes_only() -> None:
    assert sharding_mode("hsdp@int8", UNPLANNED).exchange == "int8"
    with pytest.raises(ValueError, match="expected one of fsdp2, fsdp2:reshard, hsdp, hsdp:reshard"):
        sharding_mode("hsdp:planned@int8", UNPLANNED)
    assert "fsdp2:planned" not in help_of(UNPLANNED)
    assert "hsdp:reshard (HSDP, a unit per block, freed" in help_of(SHARDING_MODES)
