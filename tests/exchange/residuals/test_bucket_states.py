"""State: carried over by parameter name, exactly; saved and loaded bit by bit; conserved at another world size."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from benchmarks.virtual import VirtualWorld
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.exchange.residuals.bucket_states import BucketStates
from anabranch.exchange.residuals.pieces import Piece
from anabranch.exchange.residuals.store import ResidualFlush
from anabranch.exchange.sparse.fixed_exchange import fixed_exchange
from exchange.sparse.worlds import EXCHANGES, gradients, step

SIZES = {"a": 5, "b": 1, "c": 40, "d": 7, "e": 12}


def residuals(state: BucketStates) -> dict[str, torch.Tensor]:
    """The residual of each parameter."""
    return {name: piece.values for name, piece in state.residuals().items()}


def filled() -> BucketStates:
    """Two buckets, each element its own number."""
    state = BucketStates(0, 2)
    for names in (("a", "b", "c"), ("d", "e")):
        bucket = state.bucket(names, [SIZES[name] for name in names])
        bucket.residual.copy_(torch.randn(len(bucket.residual)))
        bucket.step, bucket.fresh = 17, False
    return state


@settings(max_examples=50, deadline=None)
@given(order=st.permutations(list(SIZES)), cuts=st.sets(st.integers(1, 4)))
def test_another_plan_carries_residuals_over_by_name(order: list[str], cuts: set[int]) -> None:
    state = filled()
    before = {name: piece.clone() for name, piece in residuals(state).items()}
    edges = [0, *sorted(cuts), len(order)]
    for low, high in pairwise(edges):
        names = order[low:high]
        bucket = state.bucket(names, [SIZES[name] for name in names])
        assert torch.equal(bucket.residual, torch.cat([before[name] for name in names]))
        assert bucket.step == 17, "schedules go on"
    assert all(torch.equal(piece, before[name]) for name, piece in residuals(state).items())


def test_the_same_bucket_is_the_same_state() -> None:
    state = filled()
    assert state.bucket(["d", "e"], [7, 12]) is state.bucket(("d", "e"), (7, 12))
    assert not state.bucket(["d", "e"], [7, 12]).fresh
    assert state.bucket(["e", "d"], [12, 7]).fresh


def test_what_is_sent_dense_for_a_while_keeps_its_residual() -> None:
    state = filled()
    before = residuals(state)["a"].clone()
    state.bucket(["b", "c"], [1, 40])
    assert torch.equal(residuals(state)["a"], before)
    assert torch.equal(state.bucket(["a"], [5]).residual, before)


def test_two_models_share_nothing() -> None:
    one, other = filled(), BucketStates(0, 2)
    assert not other.bucket(["a", "b", "c"], [5, 1, 40]).residual.any()
    assert residuals(one)["a"].any()


def through_a_file(state: dict[str, Any], folder: Any) -> dict[str, Any]:
    torch.save(state, folder / "state")
    loaded: dict[str, Any] = torch.load(folder / "state", weights_only=True)
    return loaded


@pytest.mark.parametrize("name", ["exact", "fixed", "fixed bf16"])
def test_resuming_is_bit_exact(name: str, tmp_path: Any) -> None:
    world, numels = VirtualWorld(3), (400, 200)
    kept = [BucketStates(rank, 3) for rank in range(3)]

    def train(states: list[BucketStates], first: int, last: int) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        for number in range(first, last):
            made = gradients(3, 600, number)
            step(EXCHANGES[name], made, [s.bucket(("x", "y"), numels) for s in states], world, 0.02)
        return [*made, *(s.bucket(("x", "y"), numels).residual for s in states)]

    train(kept, 0, 5)
    resumed = [BucketStates(rank, 3) for rank in range(3)]
    for state, old in zip(resumed, kept, strict=True):
        state.load_state_dict(through_a_file(old.state_dict(), tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(train(kept, 5, 9), train(resumed, 5, 9), strict=True))


@pytest.mark.parametrize(("old", "new"), [(4, 2), (4, 3), (2, 4), (3, 1), (1, 3)])
def test_another_world_size_conserves_the_sum(old: int, new: int) -> None:
    before = [BucketStates(rank, old) for rank in range(old)]
    for state in before:
        state.bucket(["a", "c"], [5, 40]).residual.copy_(torch.randint(-99, 99, (45,)).float())
        state.bucket(["a", "c"], [5, 40]).step = 9
    after = [BucketStates(rank, new) for rank in range(new)]
    for state in after:
        state.load_state_dict(*(s.state_dict() for s in before))
        assert state.bucket(["c", "a"], [40, 5]).fresh
        assert state.bucket(["c", "a"], [40, 5]).step == 9
    for name in ("a", "c"):
        total = torch.stack([residuals(s)[name] for s in before]).sum(0)
        assert torch.equal(torch.stack([residuals(s)[name] for s in after]).sum(0), total)
    if new > old:
        assert not residuals(after[-1])["a"].any()


def test_states_of_different_checkpoints_are_refused() -> None:
    states = [BucketStates(rank, 2) for rank in range(2)]
    for rank, state in enumerate(states):
        bucket = state.bucket(["a"], [5])
        bucket.residual.fill_(rank + 1.0)
        bucket.step, bucket.fresh = 7 + rank, False
    with pytest.raises(ValueError, match=r"different checkpoints: rank 0's says step 7 .* rank 1's says step 8 "):
        BucketStates(0, 1).load_state_dict(*(state.state_dict() for state in states))
    for state in states:
        state.bucket(["a"], [5]).step = 7
    states[1].bucket(["a"], [5]).boundaries[1] = 3
    with pytest.raises(ValueError, match="bucket to a: step 7, regions"):
        BucketStates(0, 1).load_state_dict(*(state.state_dict() for state in states))


def test_what_a_gradient_could_not_hold_of_a_flush_waits_for_the_next() -> None:
    state = BucketStates(0, 1)
    state.unbucketed["a"] = Piece.whole(torch.tensor([70_000.0, 1.0]))
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    flush = ResidualFlush(state, {"a": parameter}, averaged=lambda: True, applied=lambda names: names)
    flush.send_all_but({})
    sent = torch.zeros(2)
    for _ in range(3):
        parameter.grad = None
        (parameter * torch.tensor([8.0, 8.0], dtype=torch.float16)).sum().backward()
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all())
        sent += parameter.grad.float()
    torch.testing.assert_close(sent, torch.tensor([70_024.0, 25.0]), rtol=2e-3, atol=0.1)
    assert state.unbucketed == {} and state.flushing == {}


def test_a_flushed_residual_is_gone_or_a_residual_again() -> None:
    state = filled()
    before = {name: piece.clone() for name, piece in residuals(state).items()}
    state.keep_buckets_of({"d": range(7), "e": range(12)})
    assert sorted(state.unbucketed) == ["a", "b", "c"] and state.begin_flush("d") is None
    for name in ("a", "c"):
        flushed = state.begin_flush(name)
        assert flushed is not None and torch.equal(flushed, before[name]) and state.begin_flush(name) is None
    kept = state.state_dict()["residuals"]
    assert all(torch.equal(kept[name], piece) for name, piece in before.items()), "what is being flushed is still saved"
    bucket = state.bucket(["c"], [40])
    assert not bucket.residual.any()
    bucket.residual.fill_(1.0)
    state.end_flush(sent=())
    assert torch.equal(residuals(state)["a"], before["a"])
    assert torch.equal(residuals(state)["c"], before["c"] + 1)
    state.keep_buckets_of({})
    assert state.begin_flush("a") is not None
    state.end_flush(sent=state.flushing)
    assert "a" not in residuals(state)


def test_all_residuals_follow_the_loss_scale() -> None:
    state = filled()
    before = {name: piece.clone() for name, piece in residuals(state).items()}
    state.rescale(8.0)
    assert all(torch.equal(piece, before[name]) for name, piece in residuals(state).items()), "nothing to compare with"
    state.keep_buckets_of({"d": range(7), "e": range(12)})
    state.begin_flush("a")
    state.rescale(2.0)
    kept = state.state_dict()
    assert all(torch.equal(kept["residuals"][name], piece / 4) for name, piece in before.items()) and kept["scale"] == 2
    other = BucketStates(0, 2)
    other.load_state_dict(kept)
    other.rescale(8.0)
    assert all(torch.equal(piece, before[name]) for name, piece in residuals(other).items())


def test_the_format_of_saved_states_does_not_change() -> None:
    """As version 1 was written from the beginning, whatever attributes are called today."""
    saved: dict[str, Any] = {
        "version": 1,
        "rank": 0,
        "world_size": 2,
        "step": 17,
        "scale": 8.0,
        "residuals": {"a": torch.arange(5.0), "b": torch.ones(1), "d": torch.ones(7)},
        "buckets": [{"names": ["a", "b"], "tilt": 0.25, "boundaries": [0, 2, 6], "step": 17}],
    }
    state = BucketStates(0, 2)
    state.load_state_dict(saved)
    bucket = state.bucket(["a", "b"], [5, 1])
    assert (bucket.step, bucket.fresh, bucket.boundaries.tolist()) == (17, False, [0, 2, 6])
    assert bucket.threshold_bias.item() == 0.25
    again = state.state_dict()
    assert {name: piece.tolist() for name, piece in again.pop("residuals").items()} == {
        name: piece.tolist() for name, piece in saved.pop("residuals").items()
    }
    assert again == {**saved, "velocities": {}}


def test_bad_states_are_refused() -> None:
    saved = filled().state_dict()
    with pytest.raises(ValueError, match="give its own"):
        BucketStates(1, 2).load_state_dict(saved)
    with pytest.raises(ValueError, match="all ranks"):
        BucketStates(0, 3).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"rank 0's says step 17 of 2 ranks.* rank 1's says step 17 of 3 ranks"):
        BucketStates(0, 2).load_state_dict(saved, {**saved, "rank": 1, "world_size": 3})
    with pytest.raises(ValueError, match=r"ranks \[0, 0\]: give that of each rank once"):
        BucketStates(0, 2).load_state_dict(saved, saved)
    with pytest.raises(ValueError, match=r"different checkpoints: .* rank 1's says no more buckets"):
        BucketStates(0, 1).load_state_dict(saved, {**saved, "rank": 1, "buckets": []})
    with pytest.raises(ValueError, match="distinct"):
        filled().bucket(["a", "a"], [5, 5])
    with pytest.raises(ValueError, match="elements"):
        filled().bucket(["a", "b", "c"], [5, 1, 41])
    with pytest.raises(ValueError, match="parameter a has 6"):
        filled().bucket(["a"], [6])


def test_falling_density_goes_on_conserving() -> None:
    world, states = VirtualWorld(2), [BucketStates(rank, 2) for rank in range(2)]
    for number, density in enumerate((1.0, 0.3, 0.1, 0.02)):
        made = gradients(2, 300, number)
        step(fixed_exchange, made, [s.bucket(["w"], [300]) for s in states], world, density)
        assert int((made[0] != 0).sum()) <= round(1.3 * density * 300) + 2
