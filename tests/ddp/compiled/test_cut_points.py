"""Where graphs are cut: finely at first, then where the buckets of a plan end."""

from math import inf

import pytest

from anabranch.ddp.compiled.cut_points import MIN_PART_NBYTES, PARTS, GraphShape, cuts_for, fine_cuts, is_connected

MIB = 1 << 20


def chain(layers: int, nbytes: int = MIB, steps: int = 3) -> GraphShape:
    """Layers of some operations each, of which the first uses the layer's parameter; least crosses between layers."""
    length = layers * steps
    return GraphShape(
        first_use={f"p{layer}": layer * steps for layer in range(layers)},
        nbytes={f"p{layer}": nbytes for layer in range(layers)},
        crossing=[1.0 if position % steps == 0 else 2.0 for position in range(length)],
        last_use=[position + 1 for position in range(length)],
    )


def test_each_layer_is_a_part_where_there_are_few() -> None:
    assert fine_cuts(chain(4), 4 * MIB) == (3, 6, 9)


def test_there_are_at_most_sixteen_parts_of_about_the_same_size() -> None:
    cuts = fine_cuts(chain(64), 64 * MIB)
    assert PARTS / 2 <= len(cuts) + 1 <= PARTS
    assert all(position % 3 == 0 for position in cuts)


def test_a_part_of_the_model_is_cut_no_finer_than_the_whole() -> None:
    assert fine_cuts(chain(4), 64 * MIB) == ()


def test_small_models_are_not_cut() -> None:
    assert fine_cuts(chain(4, nbytes=MIN_PART_NBYTES // 5), 4 * MIN_PART_NBYTES // 5) == ()


def test_a_cut_goes_where_least_crosses_it() -> None:
    shape = chain(2)
    wide = GraphShape(shape.first_use, shape.nbytes, [0.0, 5.0, 1.0, 5.0, 5.0, 5.0], shape.last_use)
    assert fine_cuts(wide, 2 * MIB) == (2,)  # before the second layer, where an activation is small


def test_no_cut_where_none_is_possible() -> None:
    shape = chain(3)
    crossing = [inf if 4 <= position <= 6 else 1.0 for position in range(9)]
    assert fine_cuts(GraphShape(shape.first_use, shape.nbytes, crossing, shape.last_use), 3 * MIB) == (3,)


def test_a_part_whose_results_nobody_uses_is_no_part() -> None:
    shape = chain(3)
    last_use = [*shape.last_use[:5], 9, -1, -1, -1]  # the second layer's result is returned, the third has none
    cuts = fine_cuts(GraphShape(shape.first_use, shape.nbytes, shape.crossing, last_use), 3 * MIB)
    assert cuts == (3, 5)  # and not 6, after which nothing is returned


def test_a_graph_is_connected_if_it_would_be_cut_and_cannot_be() -> None:
    shape = chain(3)
    crossing = [1.0, *[inf] * 6, 1.0, 1.0]
    assert is_connected(GraphShape(shape.first_use, shape.nbytes, crossing, shape.last_use), 3 * MIB)
    assert not is_connected(shape, 3 * MIB)
    assert not is_connected(chain(1), MIB)  # there is nothing to cut


@pytest.mark.parametrize(
    ("parts", "cuts"),
    [
        ([["p3"], ["p2"], ["p1"], ["p0"]], (3, 6, 9)),
        ([["p3", "p2"], ["p1", "p0"]], (6,)),
        ([["p3", "p2", "p1", "p0"]], ()),
        ([["p3"], ["p0"], ["p2", "p1"]], (9,)),  # the second leaves last of all, and with it the third
        ([["p2"], ["p3"], ["p1", "p0"]], (6,)),  # the second waits for the first, which is launched before it
        ([["elsewhere", "p3"], ["p2", "p1", "p0"]], (9,)),
    ],
)
def test_cuts_for_parts(parts: list[list[str]], cuts: tuple[int, ...]) -> None:
    assert cuts_for(parts, chain(4), (3, 6, 9)) == cuts


def test_cuts_for_parts_are_among_the_allowed_ones() -> None:
    assert cuts_for([["p3"], ["p2"], ["p1", "p0"]], chain(4), (3,)) == (3,)
    assert cuts_for([["p0"], ["p3", "p2", "p1"]], chain(4), (3, 6, 9)) == ()
