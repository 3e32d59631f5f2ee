"""Nouns can be copied, pickled by those who must, and changed by neither."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from anabranch import Network, Plan, TensorSpec, Timeline, Trace, simulate
from anabranch import planning as planners

TRACE = Trace((TensorSpec("a", 3, 4, 0.5), TensorSpec("b", 5, 4, 0.75)), 0.25, {"model": "tiny"})
NETWORK = Network.ring(4, 1e-5, 1e-9)
PLAN = planners.optimal(TRACE, NETWORK)


@pytest.mark.parametrize(
    "noun", [TRACE, NETWORK, PLAN, simulate(TRACE, PLAN, NETWORK)], ids=lambda noun: type(noun).__name__
)
def test_copies_are_equal_and_as_frozen(noun: Trace | Network | Plan | Timeline) -> None:
    for twin in (copy.copy(noun), copy.deepcopy(noun), pickle.loads(pickle.dumps(noun))):  # noqa: S301 (our own bytes)
        assert twin == noun and hash(twin) == hash(noun)
        if not isinstance(twin, Plan):
            with pytest.raises(TypeError, match="frozen"):
                twin.meta["model"] = "other"  # type: ignore[index]


def test_no_way_into_a_mapping() -> None:
    changes: list[Callable[[Any], object]] = [
        lambda meta: meta.update(x=1),
        lambda meta: meta.pop("model"),
        lambda meta: meta.clear(),
        lambda meta: meta.setdefault("x", 1),
        lambda meta: meta.popitem(),
        lambda meta: meta.__delitem__("model"),
        lambda meta: meta.__ior__({"x": 1}),
    ]
    for change in changes:
        with pytest.raises(TypeError, match="frozen"):
            change(TRACE.meta)
    assert dict(TRACE.meta) == {"model": "tiny"}
