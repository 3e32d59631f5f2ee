"""Rounded residuals: without bias, within a step of their format, and carried through all that a state goes through."""

import pytest
import torch

from anabranch.exchange.residuals.bucket_states import BucketState, BucketStates, PackedResidual
from anabranch.values.kinds.formats import STORED, BlockFormat

SIZES = {"a": 5, "b": 300, "c": 1, "d": 77}
FORMS = pytest.mark.parametrize("form", STORED.values(), ids=STORED)
STEP = {"bf16": 2.0**-7, "int8": 1 / 63.5}  # the most that a rounding changes, over the largest value of a block


def residuals(state: BucketStates) -> dict[str, torch.Tensor]:
    """A copy of the residual of each parameter."""
    return {name: piece.values.clone() for name, piece in state.residuals().items()}


def filled(form: BlockFormat, rank: int = 0, ranks: int = 2) -> tuple[BucketStates, dict[str, torch.Tensor]]:
    """Two buckets of numbers; and the residuals that they then have."""
    state = BucketStates(rank, ranks, form=form)
    torch.manual_seed(rank)
    for names in (("a", "b"), ("c", "d")):
        bucket = state.bucket(names, [SIZES[name] for name in names])
        assert len(bucket.residual) == 0 and not bucket.current().any(), "nothing is in float32, not even at first"
        with bucket.whole() as residual:
            residual.normal_()
        bucket.step, bucket.fresh = 17, False
        assert len(bucket.residual) == 0
    return state, residuals(state)


def test_sizes() -> None:
    nbytes = {kind: PackedResidual.zeros(1 << 20, form, 0, None).message.nbytes for kind, form in STORED.items()}
    assert nbytes == {"bf16": 2 << 20, "int8": (1 << 20) * 65 // 64}


@FORMS
def test_the_mean_of_many_roundings_is_the_value(form: BlockFormat) -> None:
    values = torch.linspace(-1.0, 1.0, 256)
    packed, draws = PackedResidual.zeros(256, form, 0, None), 2000
    total, largest = torch.zeros(256, dtype=torch.float64), 0.0
    for step in range(draws):
        packed.write(values, step, ("a",))
        read = packed.read(torch.empty(256))
        total += read
        largest = max(largest, float((read - values).abs().max()))
    assert 0.3 * STEP[form.kind] < largest <= STEP[form.kind]
    deviation = STEP[form.kind] / 2 / draws**0.5  # at most, of the mean of one value
    assert (total / draws - values).abs().max() < 5 * deviation


@FORMS
def test_ranks_steps_and_buckets_round_differently(form: BlockFormat) -> None:
    values = torch.randn(256, generator=torch.Generator().manual_seed(0))

    def read(rank: int, step: int, name: str) -> torch.Tensor:
        packed = PackedResidual.zeros(256, form, rank, None)
        packed.write(values, step, (name,))
        return packed.read(torch.empty(256))

    first = read(0, 0, "a")
    assert torch.equal(first, read(0, 0, "a"))
    assert not any(torch.equal(first, read(*other)) for other in ((1, 0, "a"), (0, 1, "a"), (0, 0, "b")))


def within_a_step(found: torch.Tensor, expected: torch.Tensor, form: BlockFormat, times: int = 1) -> bool:
    return bool((found - expected).abs().max() <= times * STEP[form.kind] * 1.01 * expected.abs().max())


@FORMS
def test_another_plan_takes_them_over(form: BlockFormat) -> None:
    state, before = filled(form)
    bucket = state.bucket(("d", "a"), (SIZES["d"], SIZES["a"]))
    for name, piece in bucket.pieces(bucket.current()).items():
        assert within_a_step(piece, before[name], form) and piece.any()
    assert torch.equal(residuals(state)["b"], before["b"]), "no bucket has it: it is not rounded again"
    state.keep_buckets_of({})
    assert state.buckets() == [] and within_a_step(residuals(state)["d"], before["d"], form)


@FORMS
def test_saved_and_loaded_they_have_the_same_bits(form: BlockFormat) -> None:
    state, before = filled(form)
    again = BucketStates(0, 2, form=form)
    again.load_state_dict(state.state_dict())
    for names in (("a", "b"), ("c", "d")):
        again.bucket(names, [SIZES[name] for name in names])
    assert all(torch.equal(piece, before[name]) for name, piece in residuals(again).items())
    exact = BucketStates(0, 2)
    exact.load_state_dict(state.state_dict())
    assert torch.equal(exact.bucket(("a", "b"), (5, 300)).residual, torch.cat([before["a"], before["b"]]))


@FORMS
def test_another_world_size_conserves_the_sum_but_for_one_rounding(form: BlockFormat) -> None:
    olds = [filled(form, rank, 2) for rank in range(2)]
    new = BucketStates(0, 1, form=form)
    new.load_state_dict(*(state.state_dict() for state, _ in olds))
    new.bucket(("a", "b"), (5, 300))
    for name in ("a", "b"):
        assert within_a_step(residuals(new)[name], olds[0][1][name] + olds[1][1][name], form)


@FORMS
def test_a_flush_that_nobody_applied_returns(form: BlockFormat) -> None:
    state, before = filled(form)
    state.keep_buckets_of({"a": range(5), "b": range(300)})
    flushed = state.begin_flush("d")
    assert flushed is not None and torch.equal(flushed, before["d"]) and "d" not in residuals(state)
    state.bucket(("d",), (SIZES["d"],))
    state.end_flush(())
    assert within_a_step(residuals(state)["d"], before["d"], form)
    state.keep_buckets_of({"a": range(5), "b": range(300)})
    state.begin_flush("d")
    state.end_flush(("d",))
    assert "d" not in residuals(state)


@FORMS
def test_they_are_held_and_scaled(form: BlockFormat) -> None:
    state, before = filled(form)
    bucket: BucketState = state.bucket(("a", "b"), (5, 300))
    bucket.hold(("a",))
    assert torch.equal(bucket.held["a"], before["a"]) and not residuals(state)["a"].any()
    assert torch.equal(state.state_dict()["residuals"]["a"], before["a"])
    state.rescale(2.0)
    state.rescale(16.0)
    bucket.hold(())
    assert within_a_step(residuals(state)["a"], 8.0 * before["a"], form)
    assert torch.equal(residuals(state)["d"], 8.0 * before["d"]), "a power of two rounds nothing"


def test_the_storage_can_change_between_steps() -> None:
    state, before = filled(STORED["int8"])
    state.store_as(None)
    assert [bucket.names for bucket in state.buckets()] == [("a", "b"), ("c", "d")]
    assert all(bucket.packed is None for bucket in state.buckets())
    assert all(torch.equal(piece, before[name]) for name, piece in residuals(state).items())
    state.store_as(STORED["bf16"])
    assert all(bucket.packed is not None and len(bucket.residual) == 0 for bucket in state.buckets())
    for name, piece in residuals(state).items():
        assert within_a_step(piece, before[name], STORED["bf16"])
    assert state.bucket(("d",), (SIZES["d"],)).packed is not None, "new buckets, too"
