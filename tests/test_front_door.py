"""The front door: the public names of architecture.md §8, and what opening it does not load."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import anabranch as ab
from ranks import patience


def test_all_is_sorted_and_true() -> None:
    assert ab.__all__ == sorted(ab.__all__)
    assert len(set(ab.__all__)) == len(ab.__all__)
    for name in ab.__all__:
        assert getattr(ab, name) is not None


def test_nothing_public_is_left_out() -> None:
    """A name that the front door imports is either in __all__ or one of our own modules."""
    public = {name for name, value in vars(ab).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public <= set(ab.__all__)


def test_star_import() -> None:
    names: dict[str, Any] = {}
    exec("from anabranch import *", names)  # the only way to test a star import
    assert set(ab.__all__) <= set(names)


def test_opening_it_loads_nothing_heavy() -> None:
    heavy = ["torch", "pydantic", "matplotlib", "plotly", "rich", "typer"]
    code = f"import sys, anabranch; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60 * patience(), check=True
    )
    assert done.stdout == "[]\n"


def test_planning_and_simulating_load_no_torch() -> None:
    code = """
import sys, anabranch as ab
trace = ab.Trace([ab.TensorSpec("a", 10, 4, 1.0)], 1.0)
network = ab.Network.ring(4, 1e-5, 1e-9)
for name in ab.planners.PLANNERS:
    ab.simulate(trace, ab.plan(trace, network, name), network)
raise SystemExit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60 * patience(), check=False).returncode == 0


SIGNATURES: dict[Callable[..., Any], list[str]] = {
    ab.TensorSpec: ["name", "numel", "itemsize", "ready_s"],
    ab.Trace: ["tensors", "forward_s", "meta"],
    ab.Network.linear: ["world_size", "start_s", "s_per_byte"],
    ab.Network.ring: ["world_size", "alpha_s", "beta_s_per_byte", "gamma_s_per_byte"],
    ab.Network.tree: ["world_size", "alpha_s", "beta_s_per_byte", "gamma_s_per_byte"],
    ab.Network.halving_doubling: ["world_size", "alpha_s", "beta_s_per_byte", "gamma_s_per_byte"],
    ab.Network.two_level: ["world_size", "ranks_per_node", "inside", "across"],
    ab.Network.measured: ["world_size", "curves"],
    ab.Network.allreduce_s: ["self", "nbytes"],
    ab.Network.seconds: ["self", "collective", "nbytes"],
    ab.Bucket: ["names", "lane", "collective"],
    ab.Plan: ["buckets"],
    ab.Plan.check: ["self", "trace"],
    ab.Plan.from_cuts: ["trace", "cuts"],
    ab.planners.per_tensor: ["trace", "network"],
    ab.planners.single: ["trace", "network"],
    ab.planners.by_bytes: ["trace", "network"],
    ab.planners.mgwfbp: ["trace", "network"],
    ab.planners.optimal: ["trace", "network"],
    ab.planners.asc: ["trace", "network"],
    ab.planners.lanes: ["trace", "network"],
    ab.plan: ["trace", "network"],
    ab.simulate: ["trace", "plan", "network"],
    ab.load: ["path"],
    ab.save: ["noun", "path"],
}


@pytest.mark.parametrize(
    ("function", "first"), SIGNATURES.items(), ids=lambda value: getattr(value, "__qualname__", "")
)
def test_signatures_stay_as_promised(function: Callable[..., Any], first: list[str]) -> None:
    """The promised parameters come first, in order, can be given by position, and any others have defaults."""
    parameters = list(inspect.signature(function).parameters.values())
    promised, others = parameters[: len(first)], parameters[len(first) :]
    assert [p.name for p in promised] == first
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in promised)
    assert all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in others)


def test_promised_defaults() -> None:
    assert ab.Bucket(("a",)) == ab.Bucket(("a",), lane=0, collective="dense")
    assert ab.Trace((ab.TensorSpec("a", 1, 4, 0.0),), 0.0).meta == {}
    assert ab.Network.ring(4, 1.0, 1.0) == ab.Network.ring(4, 1.0, 1.0, gamma_s_per_byte=0.0)


def test_any_sequence_becomes_a_tuple() -> None:
    tensor, span = ab.TensorSpec("a", 1, 4, 0.0), ab.Span("compute", "x", 0.0, 1.0)
    lists: Any = [["a"], [ab.Bucket(("a",))], [tensor], [span], [ab.CurvePoint(0, 1.0)], [1.0, 2.0]]
    names, buckets, tensors, spans, points, slowdowns = lists
    assert ab.Bucket(names).names == ("a",)
    assert ab.Plan(buckets).buckets == tuple(buckets)
    assert ab.Trace(tensors, 0.0).tensors == (tensor,)
    assert ab.Timeline(spans).spans == (span,)
    assert ab.Curve(points, 0.0).points == tuple(points)
    assert ab.Contention(slowdowns).slowdowns == (1.0, 2.0)


def test_promised_attributes() -> None:
    tensor = ab.TensorSpec("a", 3, 4, 1.0)
    trace = ab.Trace((tensor,), 0.5)
    network = ab.Network.linear(4, 1.0, 0.5)
    plan = ab.plan(trace, network)
    timeline = ab.simulate(trace, plan, network)
    assert (tensor.nbytes, trace.backward_s, network.allreduce_s(12)) == (12, 1.0, 7.0)
    assert (len(plan.fingerprint), plan.lanes) == (64, 1)
    assert (timeline.finish_s, timeline.exposed_s, timeline.iteration_s) == (8.0, 7.0, 8.5)


def test_the_error_tree() -> None:
    for error in (ab.FileError, ab.PlanError, ab.NetworkError):
        assert error.__mro__[1] is ab.AnabranchError
        assert not issubclass(error, ValueError)


def test_the_version_is_one() -> None:
    assert [part.isdigit() for part in ab.__version__.split(".")[:2]] == [True, True]
