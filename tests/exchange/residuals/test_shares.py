"""Residuals of shares: whatever levels, nodes and checkpoints follow one another, sums over the ranks are conserved."""

from copy import deepcopy
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch import Bucket, Plan
from anabranch.exchange.residuals.bucket_states import BucketStates
from anabranch.exchange.residuals.checkpoint import check_saved
from anabranch.exchange.residuals.pieces import Piece
from anabranch.exchange.shares import WHOLE, Share, within
from anabranch.frameworks.comm_state import packed, unpacked
from anabranch.values.kinds.formats import STORED
from anabranch.values.nodes import Nodes
from exchange.residuals.virtual_ranks import SIZES, Gradients, VirtualRanks, gradients, waiting

TWO_BY_TWO, INTERLEAVED = Nodes.of_size(4, 2), Nodes(((0, 2), (1, 3)))
FLAT, OF_NODES = ("dense", "int4", "oktopk:0.3"), ("dense@nodes", "int4@nodes", "oktopk:0.3@nodes")
Tensors = dict[str, torch.Tensor]


def plan_of(kind: str, *names: str) -> Plan:
    """One bucket, of all parameters if none are named."""
    return Plan((Bucket(names or tuple(SIZES), 0, kind),))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any division into buckets of any kinds."""
    order = draw(st.permutations(list(SIZES)))
    cuts = [0, *sorted(draw(st.sets(st.integers(1, len(order) - 1)))), len(order)]
    kinds = st.sampled_from((*FLAT, *OF_NODES))
    return Plan(tuple(Bucket(tuple(order[a:b]), 0, draw(kinds)) for a, b in pairwise(cuts)))


def sum_of(made: Gradients) -> Tensors:
    zeros = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
    return {name: sum((one[name].double() for one in made if name in one), zero) for name, zero in zeros.items()}


def check_conserved(ranks: VirtualRanks, plan: Plan, made: Gradients) -> Tensors:
    """A step in which nothing is lost; its averages."""
    before, given_now = ranks.waiting(), sum_of(made)
    averages = ranks.step(plan, made)
    after = ranks.waiting()
    for name in SIZES:
        sent = averages[name].double() * len(ranks.parameters)
        torch.testing.assert_close(sent + after[name], before[name] + given_now[name], rtol=1e-4, atol=1e-4)
    return averages


@settings(max_examples=15, deadline=None)
@given(
    nodes=st.sampled_from([TWO_BY_TWO, INTERLEAVED, Nodes.of_size(6, 3), Nodes.of_size(6, 2), Nodes.of_size(8, 4)]),
    phases=st.lists(st.tuples(plans(), st.integers(1, 3)), min_size=2, max_size=5),
    seed=st.integers(0, 1000),
)
def test_plans_follow_one_another(nodes: Nodes, phases: list[tuple[Plan, int]], seed: int) -> None:
    size = len(nodes) * nodes.per_node
    ranks = VirtualRanks(size, nodes)
    for plan, steps in phases:
        ranks.use_plan(plan)
        for _ in range(steps):
            seed += 1
            check_conserved(ranks, plan, gradients(size, seed))


@pytest.mark.parametrize("kind", ["int4", "oktopk:0.3"])
def test_a_change_of_levels_and_back(kind: str) -> None:
    """Widened from shares to flat at once; from flat to shares with the next gradient."""
    ranks = VirtualRanks(4, TWO_BY_TWO)
    flat, nodes = plan_of(kind), plan_of(f"{kind}@nodes")
    for number, plan in enumerate((nodes, flat, nodes)):
        before = ranks.waiting()
        ranks.use_plan(plan)
        states = [one.state_dict()["residuals"] for one in ranks.residuals]
        assert all(torch.equal(piece, before[name]) for name, piece in ranks.waiting().items())
        check_conserved(ranks, plan, gradients(4, number))
        assert (number > 0) == any(states)
    sizes = {len(state["residuals"]["matrix"]) for state in (one.state_dict() for one in ranks.residuals)}
    assert sizes == {SIZES["matrix"] // 2}, "residuals of n/R"


@pytest.mark.parametrize("unused", [False, True])
def test_what_cannot_be_taken_waits_for_a_gradient(unused: bool) -> None:
    ranks = VirtualRanks(4, TWO_BY_TWO)
    ranks.use_plan(plan_of("int4"))
    check_conserved(ranks, plan_of("int4"), gradients(4, 0))
    plan = plan_of("int4@nodes")
    ranks.use_plan(plan)
    for seed in (1, 2):
        made = gradients(4, seed)
        if unused and seed == 1:
            made = [{name: piece for name, piece in one.items() if name != "rows"} for one in made]
        check_conserved(ranks, plan, made)
        left = {name for one in ranks.residuals for name in one._states.unbucketed}
        assert left == ({"rows"} if unused and seed == 1 else set())


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("bad", ["matrix", "rows"])
@pytest.mark.parametrize("former", ["int4", "int4@nodes"])
def test_a_step_with_nan(former: str, bad: str, scale: float | None) -> None:
    """One share of one bucket is poisoned, in the step that flushes: nothing of it was sent, all of the other was."""
    ranks = VirtualRanks(4, TWO_BY_TWO)
    plan = Plan((
        Bucket(("matrix", "odd"), 0, "int4@nodes"), Bucket(("rows",), 0, "oktopk:0.3@nodes"), Bucket(("scalar",)),
    ))  # fmt: skip
    ranks.use_plan(plan_of(former))
    check_conserved(ranks, plan_of(former), gradients(4, 0))
    ranks.use_plan(plan)
    if scale is not None:
        for one in ranks.residuals:
            one.rescale(scale)
    before, made = ranks.waiting(), gradients(4, 1)
    made[3][bad][-1] = float("nan")
    total = sum_of(made)
    averages = ranks.step(plan, made)
    assert averages[bad][-1].isnan() and averages[bad][0].isfinite(), "the other share knows nothing of it"
    after = ranks.waiting()
    for name in SIZES:
        taken = averages[name].isfinite() & (name != "scalar")
        sent = 0.0 if scale is not None else 4.0 * averages[name].double()  # else what was sent is put back
        expected = torch.where(taken, before[name] + total[name] - sent, before[name])
        torch.testing.assert_close(after[name], expected, rtol=1e-4, atol=1e-4)
    check_conserved(ranks, plan, gradients(4, 2))


def test_averages_that_nobody_applied_return_to_the_ranks_of_their_share() -> None:
    ranks = VirtualRanks(4, TWO_BY_TWO)
    ranks.use_plan(plan := plan_of("int4@nodes"))
    averages = ranks.step(plan, gradients(4, 0))
    before = ranks.waiting()
    for rank, one in enumerate(ranks.residuals):
        own = [Share(2, rank % 2).of(size) for size in SIZES.values()]
        parts = zip(averages.values(), own, strict=True)
        state = one.bucket_state(plan.buckets[0])
        state.take_back(torch.cat([average[part.start : part.stop] for average, part in parts]), 0.5)
    for name, piece in ranks.waiting().items():
        torch.testing.assert_close(piece, before[name] + 0.5 * 4 * averages[name].double(), rtol=1e-5, atol=1e-5)


def test_averages_are_remembered_under_a_loss_scale_alone() -> None:
    (one,) = VirtualRanks(1).residuals
    bucket, average = plan_of("int4").buckets[0], torch.ones(sum(SIZES.values()))
    one.bucket_state(bucket, average)
    assert one._exchanged == []
    one.rescale(2.0)
    one.bucket_state(bucket, average)
    assert len(one._exchanged) == 1


def test_they_follow_the_loss_scale_before_they_are_flushed() -> None:
    ranks = VirtualRanks(4, TWO_BY_TWO)
    ranks.use_plan(plan_of("int4"))
    for one in ranks.residuals:
        one.rescale(4.0)
    check_conserved(ranks, plan_of("int4"), gradients(4, 0))
    ranks.use_plan(plan := plan_of("int4@nodes"))
    before = ranks.waiting()
    for one in ranks.residuals:
        one.rescale(16.0)
    assert all(torch.equal(piece, 4 * before[name]) for name, piece in ranks.waiting().items())
    check_conserved(ranks, plan, gradients(4, 1))


@pytest.mark.parametrize("form", STORED.values(), ids=STORED)
def test_stored_rounded(form: Any) -> None:
    """Once they are in their bucket they are rounded in each step, and otherwise as in float32."""
    ranks = VirtualRanks(4, TWO_BY_TWO, form=form)
    for number, kind in enumerate(("int4@nodes", "int4", "int4@nodes", "dense@nodes")):
        ranks.use_plan(plan := plan_of(kind))
        before, made = ranks.waiting(), gradients(4, number)
        total, averages = sum_of(made), ranks.step(plan, made)
        for one in ranks.residuals:
            for state in one.buckets():
                assert state.packed is not None and len(state.residual) == 0
        for name, piece in ranks.waiting().items():
            difference = 4 * averages[name].double() + piece - before[name] - total[name]
            assert float(difference.abs().max()) < 4 * 0.02 * max(1.0, float(piece.abs().max()))
    assert not any(piece.any() for piece in ranks.waiting().values())


def test_the_first_exchange_of_shares_sends_gradients_in_place_of_velocities() -> None:
    """A velocity would take a tenth of what is flushed, and be reset when that is sent."""
    ranks = VirtualRanks(4, TWO_BY_TWO, momentum=0.9)
    ranks.use_plan(flat := plan_of("oktopk:0.3"))
    for seed in range(3):
        ranks.step(flat, gradients(4, seed))
    assert ranks.residuals[0].velocity(flat.buckets[0]) is not None
    ranks.use_plan(nodes := plan_of("oktopk:0.3@nodes"))
    made = gradients(4, 3)
    made[1]["matrix"][0] = float("nan")
    ranks.step(nodes, made)
    check_conserved(ranks, nodes, gradients(4, 4))  # again, since the flush of the poisoned share was not sent
    assert ranks.residuals[0].velocity(nodes.buckets[0]) is not None
    assert all("matrix" not in one._states.velocities for one in ranks.residuals), "of another share"
    ranks.step(nodes, gradients(4, 5))
    velocity = ranks.residuals[1]._states.all_velocities()["matrix"]
    ranks.use_plan(flat)
    ranks.residuals[1].bucket_state(flat.buckets[0])
    widened = ranks.residuals[1]._states.all_velocities()["matrix"].values
    assert velocity.values.any() and torch.equal(widened, velocity.expanded()), "flat buckets take them over"


# ---------------------------------------------------------------------------------------------------------- checkpoints


def saved(ranks: VirtualRanks) -> list[dict[str, Any]]:
    """The states of all ranks, through the entries of torch.distributed.checkpoint, and checked."""
    states = [unpacked(dict(packed(one.state_dict()))) for one in ranks.residuals]
    for state in states:
        check_saved(state, SIZES)
    return states


@cache
def states_of(size: int, nodes: Nodes | None, kind: str) -> list[dict[str, Any]]:
    """The states of all ranks after three steps."""
    ranks = VirtualRanks(size, nodes)
    ranks.use_plan(plan_of(kind))
    for seed in range(3):
        ranks.step(plan_of(kind), gradients(size, seed))
    return saved(ranks)


SHAPES: list[tuple[int, Nodes | None, str]] = [
    (4, None, "int4"),
    (4, TWO_BY_TWO, "int4@nodes"),
    (4, INTERLEAVED, "oktopk:0.3@nodes"),
    (4, TWO_BY_TWO, "oktopk:0.3@nodes"),
    (8, Nodes.of_size(8, 4), "oktopk:0.3@nodes"),
    (6, Nodes.of_size(6, 2), "int4@nodes"),
    (3, None, "oktopk:0.3"),
    (2, None, "dense"),
]


@pytest.mark.parametrize("old", SHAPES, ids=str)
@pytest.mark.parametrize("new", SHAPES, ids=str)
def test_another_shape_goes_on_with_the_same_sums(
    old: tuple[int, Nodes | None, str], new: tuple[int, Nodes | None, str]
) -> None:
    (size, nodes, kind), (new_size, new_nodes, new_kind) = old, new
    states, resumed = states_of(size, nodes, kind), VirtualRanks(new_size, new_nodes)
    for rank, one in enumerate(resumed.residuals):
        one.load_state_dict(*(states if size != new_size else [states[rank]]))
    assert len({"\n".join(one.loaded()) for one in resumed.residuals}) == 1, "all ranks say that they loaded the same"
    for name, piece in resumed.waiting().items():
        torch.testing.assert_close(piece, waiting(states)[name], rtol=1e-5, atol=1e-5)
    resumed.use_plan(plan_of(new_kind))
    for seed in range(2):
        check_conserved(resumed, plan_of(new_kind), gradients(new_size, seed))
    fresh = {state.fresh for one in resumed.residuals for state in one.buckets()}
    assert len(fresh) <= 1


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["int4@nodes", "oktopk:0.3@nodes"])
@pytest.mark.parametrize("nodes", [TWO_BY_TWO, INTERLEAVED], ids=["in order", "interleaved"])
def test_the_same_shape_resumes_bit_by_bit(nodes: Nodes, kind: str, momentum: float) -> None:
    plan = plan_of(kind)
    through, resumed = (VirtualRanks(4, nodes, momentum=momentum) for _ in range(2))
    through.use_plan(plan)
    for seed in range(4):
        through.step(plan, gradients(4, seed))
    for one, state in zip(resumed.residuals, saved(through), strict=True):
        one.load_state_dict(state)
    resumed.use_plan(plan)
    for seed in range(4, 8):
        expected, found = (ranks.step(plan, gradients(4, seed)) for ranks in (through, resumed))
        assert all(torch.equal(found[name], piece) for name, piece in expected.items())
    for one, other in zip(through.residuals, resumed.residuals, strict=True):
        a, b = one.state_dict(), other.state_dict()
        for kind_of_piece in ("residuals", "velocities"):
            theirs = b.pop(kind_of_piece)
            assert all(torch.equal(theirs[name], piece) for name, piece in a.pop(kind_of_piece).items())
        assert a == b


def test_regions_are_loaded_on_the_same_nodes_alone() -> None:
    states = states_of(4, TWO_BY_TWO, "oktopk:0.3@nodes")
    assert states[0]["nodes"] == [[0, 1], [2, 3]]
    assert len(states[0]["buckets"][0]["boundaries"]) == 3
    for nodes, fresh in ((TWO_BY_TWO, False), (INTERLEAVED, True)):
        for rank, state in enumerate(states):
            kept = BucketStates(rank, 4, nodes=nodes)
            kept.load_state_dict(state)
            bucket = kept.bucket(tuple(SIZES), tuple(SIZES.values()), kept.share)
            assert bucket.fresh == fresh
            assert fresh or bucket.boundaries.tolist() == state["buckets"][0]["boundaries"]
    flat = BucketStates(0, 4, nodes=TWO_BY_TWO)
    flat.load_state_dict(states[0])
    assert flat.bucket(tuple(SIZES), tuple(SIZES.values())).fresh, "one region per node does not suit all ranks"


def test_flat_checkpoints_are_as_they_were() -> None:
    assert states_of(4, TWO_BY_TWO, "oktopk:0.3")[0].keys().isdisjoint({"slices", "nodes"})


def test_velocities_of_another_share_begin_at_zero() -> None:
    states = BucketStates(0, 4, nodes=TWO_BY_TWO)
    states.velocities = {"a": Piece(torch.ones(4), 0, 8), "b": Piece(torch.ones(4), 4, 8)}
    bucket = states.bucket(("a", "b"), (8, 8), states.share)
    assert bucket.sent_velocity().tolist() == [1.0] * 4 + [0.0] * 4 and not states.velocities


def spoiled() -> dict[str, Any]:
    """By what it is, one thing that is wrong in a state: the fields to change, and a word of the error."""
    texts: list[Any] = [None, [], 7, "a", {"others": {}}, {7: {}}]
    names: list[Any] = [None, [], {"another": [0, 9]}, {7: [0, 9]}]
    slices: list[Any] = [[-1, 60], [60, 60], [1 << 70, 60], [0, 61], [0, 59], [0, 1 << 70], [0.0, 60], [True, 60], [0],
                         [0, 60, 1], None, "ab", 7, {}, ["0", 60]]  # fmt: skip
    nodes: list[Any] = [[[0, 1], [2]], [[0, 1], [2, 2]], [[0, 1]], [[0, 1], [2, 4]], [0, 1, 2, 3], [[0, 1], [2, 3.0]],
                        [[], []], [], "ab", 7, {}, [[0, 1], [2, -3]], [[0, 1], [2, 1 << 70]], [[False, 1], [2, 3]],
                        [[0, 1], [2, 3], [4, 5]]]  # fmt: skip
    boundaries: list[Any] = [[0, 50, 101], [0, 20, 51], [0, 60, 50], [1, 20, 50], [0, 1, 2, 50], [0, 50], [0, -1, 50]]
    return {
        **{f"slice {one}": (("slices", "residuals", "matrix"), one, "slices.residuals['matrix']") for one in slices},
        **{f"nodes {one}": (("nodes",), one, "nodes") for one in nodes},
        **{f"boundaries {one}": (("buckets", 0, "boundaries"), one, "buckets[0].boundaries") for one in boundaries},
        **{f"slices {one!r}": (("slices",), one, "slices") for one in texts},
        **{f"names {one!r}": (("slices", "residuals"), one, "slices.residuals")
           for one in names},
        "of a residual that is not there": (("slices", "velocities"), {"matrix": [0, 60]}, "slices.velocities, a name"),
        "too long": (("residuals", "matrix"), torch.zeros(31), "residuals['matrix']"),
        "empty": (("residuals", "matrix"), torch.zeros(0), "residuals['matrix']"),
        "two dimensions": (("residuals", "matrix"), torch.zeros(2, 15), "residuals['matrix']"),
        "half": (("residuals", "matrix"), torch.zeros(30).half(), "residuals['matrix']"),
        "not finite": (("residuals", "matrix"), torch.full((30,), float("nan")), "residuals['matrix']"),
    }  # fmt: skip


@pytest.mark.parametrize("what", spoiled())
def test_a_spoiled_state_is_refused_by_the_name_of_its_field(what: str) -> None:
    state = deepcopy(states_of(4, TWO_BY_TWO, "oktopk:0.3@nodes")[1])
    assert state["slices"]["residuals"]["matrix"] == [30, 60]
    path, value, word = spoiled()[what]
    place: Any = state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    kept = VirtualRanks(4, TWO_BY_TWO).residuals[1]
    with pytest.raises(ValueError) as caught:
        kept.load_state_dict(state)
    assert word in str(caught.value) and "expected" in str(caught.value) and len(str(caught.value)) < 600
    assert not any(kept._states.residuals())


# --------------------------------------------------------------------------------------------------------------- pieces


@given(parts=st.integers(1, 9), numel=st.integers(0, 100))
def test_shares_divide_a_parameter(parts: int, numel: int) -> None:
    ranges = [Share(parts, number).of(numel) for number in range(parts)]
    assert [element for part in ranges for element in part] == list(range(numel))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    assert all(within(part, WHOLE.of(numel)) for part in ranges)
    assert not any(part and within(part, other) for part in ranges for other in ranges if part is not other)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=6))
def test_pieces_are_added_as_if_they_were_whole(ends: list[tuple[int, int]]) -> None:
    pieces = [Piece(torch.randint(-9, 9, (length,)).float(), low, 20) for low, length in ends]
    total = pieces[0]
    for piece in pieces[1:]:
        total = total.plus(piece)
    naive = [0.0] * 20
    for piece in pieces:
        for element, value in zip(piece.elements, piece.values.tolist(), strict=True):
            naive[element] += value
    assert total.expanded().tolist() == naive
    assert len(total.values) == max(low + length for low, length in ends) - min(low for low, _ in ends)


def test_saved_pieces_are_summed_naively_here() -> None:
    """The oracle itself, against whole tensors."""
    state = {"residuals": {"odd": torch.arange(3.0)}, "slices": {"residuals": {"odd": [2, 7]}}}
    assert waiting([state, {"residuals": {"odd": torch.ones(7)}}])["odd"].tolist() == [1, 1, 1, 2, 3, 1, 1]
