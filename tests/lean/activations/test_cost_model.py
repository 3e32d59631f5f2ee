"""What the cost model predicts is what a played-out step shows."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.lean.activations.cost_model import RECOMPUTED, Action, BlockCosts, HostLink, predict
from lean.activations.naive_solver import chains, every_choice, links, played_extra_s, played_peak


@given(chains(7, all_offload=False), links, st.data())
def test_prediction_is_what_playing_it_out_shows(blocks: list[BlockCosts], link: HostLink, data: st.DataObject) -> None:
    actions: dict[str, Action] = {}
    for number, block in enumerate(blocks):
        before = "recompute" if number and actions[blocks[number - 1].name] in RECOMPUTED else "keep"
        pairs = every_choice([replace(block, name="before", recomputes=True), block])
        possible = {pair[block.name] for pair in pairs if pair["before"] == before}
        actions[block.name] = data.draw(st.sampled_from(sorted(possible)))
    forecast = predict(blocks, link, actions)
    assert forecast.extra_s == pytest.approx(played_extra_s(blocks, link, actions), abs=1e-9)
    assert forecast.peak_nbytes == played_peak(blocks, actions)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BlockCosts("a", -1.0, 0, 0, 0), "forward_s of block a is -1.0"),
        (lambda: BlockCosts("a", 0, 0, 0, 3, 4), "block a shares 4 bytes of an input of 3"),
        (lambda: HostLink(0, 1), "out_nbytes_per_s is 0"),
        (lambda: predict([BlockCosts("a", 1, 1, 5, 6)], HostLink(1, 1), {}), "no action for block 'a'"),
        (
            lambda: predict([BlockCosts("a", 1, 1, 5, 6)], HostLink(1, 1), {"a": "join"}),
            "is to join: expected one of keep, ",
        ),
    ],
)
def test_refusals(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
