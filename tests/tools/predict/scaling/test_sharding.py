"""Sharded strategies in a scaling study: blocks out of a trace, links out of a network, and their points."""

import pytest

from anabranch import AlphaBeta, Network, TensorSpec, Trace
from anabranch.fsdp.planning.sharding_modes import SHARDING_MODES, sharding_mode
from anabranch.tools.predict.scaling import scale
from anabranch.tools.predict.scaling.result import Strategy
from anabranch.tools.predict.scaling.sharding import block_of, links_of, sharded_trace
from anabranch.values.files import load_bundled_trace

RING = AlphaBeta("ring", 1e-6, 1e-10)
TRACE = Trace(
    (
        TensorSpec("head.weight", 5, 4, 1.0),
        TensorSpec("layers.1.b", 1, 4, 2.0),
        TensorSpec("layers.1.a", 2, 4, 4.0),
        TensorSpec("layers.0.a", 3, 4, 7.0),
        TensorSpec("stem.weight", 4, 4, 10.0),
    ),
    forward_s=5.0,
)


def test_blocks_are_told_from_names_and_times_from_gradients() -> None:
    found = sharded_trace(TRACE)
    assert [(b.name, b.nbytes, b.backward_s) for b in found.blocks] == [("layers.0", 12, 6.0), ("layers.1", 12, 4.0)]
    assert [b.forward_s for b in found.blocks] == [3.0, 2.0]
    assert (found.rest_nbytes, found.rest_gradient_nbytes) == (36, 36)
    assert found.compute_s == TRACE.forward_s + TRACE.backward_s


def test_a_block_ends_with_a_number() -> None:
    cases: list[tuple[str, str]] = [
        ("layer1.0.conv1.weight", "layer1.0"),
        ("transformer.h.11.mlp.c_fc.bias", "transformer.h.11"),
        ("features.0.weight", "features.0"),
        ("conv1.weight", ""),
        ("scale.0", ""),  # a parameter of a list, not of a module of it
    ]
    for name, block in cases:
        assert block_of(name) == block


def test_a_trace_without_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="no block can be told from the names of the trace, such as weight"):
        sharded_trace(Trace((TensorSpec("weight", 1, 4, 1.0),), 1.0))


def test_hsdp_sends_inside_nodes_and_through_one_card_between_them() -> None:
    network = Network.two_level(16, 8, RING, AlphaBeta("ring", 1e-5, 1e-9))
    links = links_of(sharding_mode("hsdp"), network)
    assert links.between is not None and (links.inside.world_size, links.between.world_size) == (8, 2)
    # A shard of an eighth, eight of which pass the card: as long as the whole would alone.
    assert links.average_s(8_000_000) == pytest.approx(2e-5 + 8_000_000 * 1e-9)
    assert links_of(sharding_mode("hsdp"), network.at(8)).between is None
    assert links_of(sharding_mode("fsdp2"), network).inside == network


def test_what_cannot_be_is_refused() -> None:
    cases: list[tuple[str, str, str]] = [
        ("hsdp", "25gbe", "this network has none: expected one like nvlink"),
        ("zero3", "25gbe", "--sharded is 'zero3': expected one of fsdp2"),
    ]
    for way, network, words in cases:
        with pytest.raises(ValueError, match=words):
            scale(TRACE, [network], [4], ["by_bytes"], (), sharded=[way])


def test_planned_units_are_never_slower_than_a_unit_per_block() -> None:
    found = scale(load_bundled_trace("gpt2"), ["nvlink+25gbe"], [8, 32], ["by_bytes"], (), sharded=list(SHARDING_MODES))
    assert any("blocks of sharded strategies" in line for line in found.assumptions)
    curves = found.on("nvlink+25gbe")
    for size in (8, 32):
        for family in ("fsdp2", "hsdp"):
            kept, freed, planned = (curves[f"{family}{units}"][size] for units in ("", ":reshard", ":planned"))
            assert planned.iteration_s <= kept.iteration_s <= freed.iteration_s
            assert planned.iteration_low_s <= planned.iteration_s <= planned.iteration_high_s
            assert planned.exposed_s >= 0


def test_compressed_exchanges_between_nodes_are_priced() -> None:
    ways = ["hsdp", "hsdp@int8", "hsdp@oktopk:0.01", "hsdp:planned@int8"]
    found = scale(load_bundled_trace("gpt2"), ["nvlink+25gbe"], [8, 32], ["by_bytes"], (), sharded=ways)
    curves = found.on("nvlink+25gbe")
    dense, int8, sparse, planned = (curves[way][32].iteration_s for way in ways)
    assert sparse < int8 < dense and planned <= int8
    assert len({curves[way][8].iteration_s for way in ways[:3]}) == 1, "one node sends nothing between nodes"
    assert any(line.startswith("hsdp@…") for line in found.assumptions)
    links = links_of(sharding_mode("hsdp@oktopk:0.010"), Network.two_level(16, 8, RING, RING))
    assert links.kind == "oktopk:0.01"


def test_compressed_exchanges_between_nodes_do_not_count_as_dense() -> None:
    names = ["fsdp2", "fsdp2:planned", "hsdp:reshard", "hsdp@bf16", "hsdp:planned@int8", "hsdp@oktopk:0.01"]
    sent = ["dense"] * 3 + ["quantised"] * 2 + ["sparse"]
    assert [Strategy(name, "sharded").sends for name in names] == sent
    found = scale(load_bundled_trace("gpt2"), ["nvlink+25gbe"], [32], ["by_bytes"], (), sharded=["hsdp", "hsdp@int4"])
    assert "Rounding wins at 32 ranks, most at 32: hsdp@int4" in found.answer[0]
