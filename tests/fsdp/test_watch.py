"""ab.watch: what a sharded model does in a step, recorded on live ranks, beside what is predicted."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import anabranch as ab
from anabranch.fsdp import watch as watching
from anabranch.fsdp.planning import Links
from anabranch.fsdp.shard import no_groups_reason
from anabranch.observe.clock import HostClock
from fsdp.small_model import (
    BLOCKS,
    WIDTH,
    batch_of,
    groups_of,
    model_of,
    train,
    two_nodes,
    weights,
)
from ranks import on_ranks

BLOCK_NUMEL = WIDTH * (WIDTH + 1) + 3 * (WIDTH + 1) + (WIDTH + 1) * WIDTH + WIDTH


Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two() -> Found:
    """What each of two ranks found, by scenario."""
    return on_ranks(on_two, 2, timeout_s=120)


@pytest.fixture(scope="module")
def four() -> Found:
    """What each of four ranks found, in two nodes."""
    return on_ranks(on_four, 4, timeout_s=120)


def on_two(rank: int) -> dict[str, Any]:
    every = [nodes_of_one_rank, closed_before_backward, accumulating]
    if hasattr(FSDPModule, "finalize_backward"):
        every.append(finalized_by_hand)
    found: dict[str, Any] = {scenario.__name__: scenario(rank) for scenario in every}
    found["recorded"] = [recorded(rank, 1, None, half) for half in (False, True)]
    found["predicted"] = [predicted_and_measured(half, nodes=1) for half in (False, True)]
    found["in another order"] = [in_another_order(rank, unused) for unused in (False, True)]
    return found


def on_four(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {one.__name__: one(rank) for one in (replication_closed_first, watched_too_early)}
    found["recorded"] = [recorded(rank, 2, compress, False) for compress in (None, "int8")]
    found["predicted"] = [predicted_and_measured(False, nodes=2)]
    return found


def parts_of(model: nn.Module) -> list[Any]:
    """What FSDP2 calls to send, in every unit."""
    names = ("_all_gather_comm", "_reduce_scatter_comm", "_all_reduce_hook")
    return [getattr(group, name) for group in groups_of(model) for name in names]


def recorded(rank: int, nodes: int, compress: str | None, half: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if nodes == 1 else two_nodes()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else None
    models = [model_of(mesh["shard"] if compress else mesh, policy=policy) for _ in range(2)]
    replications = [ab.replicate(model, mesh, compress=compress) for model in models if compress]
    before = parts_of(models[0])
    watch = ab.watch(models[0])
    equal = train(models[0], range(5)) == train(models[1], range(5))
    trace, timeline, metrics = watch.trace(), watch.timeline(), watch.metrics()
    text = watch.explain(Links(ab.Network.linear(2, 1e-4, 0.0), overlaps=False))
    watch.close()
    restored = all(now is then for now, then in zip(parts_of(models[0]), before, strict=True))
    train(models[0], range(5, 7))
    train(models[1], range(5, 7))
    one, other = weights(models[0]), weights(models[1])
    for replication in replications:
        replication.close()
    return {
        "equal": equal and all(torch.equal(weight, other[name]) for name, weight in one.items()),
        "tracks": sorted({span.track for span in timeline.spans}),
        "spans": [span.name for span in timeline.spans if span.track != "compute"],
        "blocks": [[block.name, block.nbytes, block.gradient_nbytes] for block in trace.blocks],
        "rest": [trace.rest_nbytes, trace.rest_gradient_nbytes],
        "positive": all(block.forward_s > 0 and block.backward_s > 0 for block in trace.blocks),
        "metrics": metrics,
        "text": text,
        "restored": restored,
    }


def test_a_step_is_recorded_and_not_changed(two: Found, four: Found) -> None:
    for half in (False, True):
        check_recorded(two[0]["recorded"][half], nodes=1, half=half)
    for found in four[0]["recorded"]:
        check_recorded(found, nodes=2, half=False)


def check_recorded(found: dict[str, Any], nodes: int, half: bool) -> None:
    assert found["equal"] and found["restored"] and found["positive"]
    assert found["tracks"] == ["between", "compute", "inside"][nodes == 1 :]
    names = [str(i) for i in range(1, BLOCKS + 1)]
    itemsize = 2 if half else 4
    assert found["blocks"] == [[name, itemsize * BLOCK_NUMEL, 4 * BLOCK_NUMEL] for name in names]
    assert found["rest"] == [itemsize * 8 * WIDTH, 4 * 8 * WIDTH]
    for name in names:
        assert found["spans"].count(f"gather {name}") == 2  # in forward and, as it is freed, in backward
        assert found["spans"].count(f"reduce {name}") == 1
        assert found["spans"].count(f"average {name}") == (nodes > 1)
    metrics = found["metrics"]
    sent_s = metrics["inside_s"] + metrics["between_s"]
    assert metrics["exposed_s"] == pytest.approx(sent_s) and metrics["overlap"] == pytest.approx(0)  # CPUs wait
    assert metrics["step_s"] >= metrics["compute_s"] + sent_s
    assert "3 units, 3 freed after forward, 1 gathered ahead" in found["text"] and "Predicted" in found["text"]


def replication_closed_first(rank: int) -> bool:
    """Trains on, although the replication that was watched has no groups any more."""
    mesh = two_nodes()
    model = model_of(mesh["shard"])
    replication = ab.replicate(model, mesh, compress="int8")
    watch = ab.watch(model)
    train(model, range(2))
    replication.close()
    closed = parts_of(model)[2::3]
    watch.close()
    train(model, range(2, 3))
    return parts_of(model)[2::3] == closed


def test_a_closed_replication_does_not_come_back(four: Found) -> None:
    assert all(one["replication_closed_first"] for one in four)


def watched_too_early(rank: int) -> str:
    mesh = two_nodes()
    model = model_of(mesh["shard"])
    watch = ab.watch(model)
    replication = ab.replicate(model, mesh)
    train(model, range(3))
    with pytest.raises(RuntimeError) as caught:
        watch.timeline()
    replication.close()
    train(model, range(3))
    assert {span.track for span in watch.timeline().spans} == {"compute", "inside"}
    return str(caught.value)


def test_a_watch_says_that_it_came_too_early(four: Found) -> None:
    for one in four:
        assert "came after ab.watch(): close() this watch, and make another one" in one["watched_too_early"]


def nodes_of_one_rank(rank: int) -> list[str]:
    model = model_of(two_nodes())
    watch = ab.watch(model)
    train(model, range(3))
    return [span.name for span in watch.timeline().communication]


def test_hsdp_with_one_rank_in_a_node_only_averages(two: Found) -> None:
    expected = [f"average {unit}" for unit in ("3", "2", "1", "the rest")]
    assert [one["nodes_of_one_rank"] for one in two] == [expected] * 2


def closed_before_backward(rank: int) -> bool:
    """In the middle of a pass: nothing is left on the parameters."""
    model = model_of(init_device_mesh("cpu", (2,)))
    watch = ab.watch(model)
    loss = model(batch_of(0)).square().mean()
    watch.close()
    loss.backward()
    return watch._now is None and not watch._gradients and not watch._passes


def test_a_watch_may_be_closed_at_any_time(two: Found) -> None:
    assert all(one["closed_before_backward"] for one in two)


class OwnClock(HostClock):
    """Goes on only where something is said to take time."""

    now_s = 0.0

    def mark(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


CLOCK = OwnClock()


class Slow(torch.autograd.Function):
    """Takes ``seconds`` in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        CLOCK.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        CLOCK.sleep(2 * ctx.seconds)
        return gradients[0], None


class SlowLayer(nn.Linear):
    """Computes for 50 ms and 100 ms."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(Slow.apply(super().forward(x), 0.05))  # type: ignore[no-untyped-call]


class SlowCollective:
    """FSDP2's own, 80 ms late."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.allocate = inner, inner.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        CLOCK.sleep(0.08)
        return self.inner(*args, **kwargs)


def later(hook: Any, buffer: torch.Tensor) -> None:
    """The exchange between nodes, 60 ms late."""
    CLOCK.sleep(0.06)
    hook(buffer)


def predicted_and_measured(half: bool, nodes: int) -> list[tuple[float, float]]:
    """Two layouts, predicted from a record of the first one."""
    names, found = [str(i) for i in range(3)], []
    mesh = init_device_mesh("cpu", (2,)) if nodes == 1 else two_nodes()
    inside, between = ab.Network.linear(2, 0.16, 0.0), ab.Network.linear(2, 0.06, 0.0)
    links = Links(inside, between if nodes > 1 else None, overlaps=False)
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32) if half else MixedPrecisionPolicy()
    kept = ab.ShardingPlan.per_block(names, reshard=False)
    grouped = ab.ShardingPlan.from_cuts(names, [2], prefetch=2)
    plans = [ab.ShardingPlan.per_block(names), kept if no_groups_reason({"mp_policy": policy}) else grouped]
    trace: ab.ShardedTrace | None = None
    for plan in plans:
        model = nn.Sequential(*(SlowLayer(4, 4) for _ in names))
        ab.shard(model, mesh if nodes == 1 else mesh["shard"], plan, mp_policy=policy)
        replication = ab.replicate(model, mesh) if nodes > 1 else None
        for group in groups_of(model):
            group._all_gather_comm = SlowCollective(group._all_gather_comm)
            group._reduce_scatter_comm = SlowCollective(group._reduce_scatter_comm)
            if replication is not None:
                group._all_reduce_hook = partial(later, group._all_reduce_hook)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(watching, "clock_for", lambda device: CLOCK)
            watch = ab.watch(model)
        for _ in range(4):
            model(torch.randn(2, 4)).sum().backward()
        trace = trace or watch.trace()
        found.append((ab.sharded.simulate(trace, plan, links).iteration_s, watch.timeline().iteration_s))
        if replication is not None:
            replication.close()
    return found


def test_predicted_steps_are_those_measured(two: Found, four: Found) -> None:
    """Also where FSDP2 casts what a block returns, and waits for parameters behind that cast; and between nodes."""
    for layouts in [*two[0]["predicted"], *four[0]["predicted"]]:
        for predicted_s, measured_s in layouts:
            assert predicted_s == pytest.approx(measured_s, rel=1e-9)


def accumulating(rank: int) -> tuple[int, str]:
    model = model_of(init_device_mesh("cpu", (2,)))
    watch = ab.watch(model)
    error = ""
    try:
        watch.trace()
    except RuntimeError as caught:
        error = str(caught)
    for step in range(6):
        model.set_requires_gradient_sync(step % 2 == 1)  # type: ignore[operator]
        model(batch_of(step)).square().mean().backward()
    with torch.no_grad():
        model(batch_of(9))
    return len(watch._passes), error


def test_passes_that_do_not_reduce_are_no_steps(two: Found) -> None:
    for steps, error in (one["accumulating"] for one in two):
        assert steps == 2  # of three: the last one's optimizer is not over
        assert "no step was recorded yet: none was made; train two or more steps" in error


def finalized_by_hand(rank: int) -> str:
    model: Any = model_of(init_device_mesh("cpu", (2,)))
    watch = ab.watch(model)
    model.set_manual_backward_finalization(True)
    for step in range(3):
        model(batch_of(step)).square().mean().backward()
        model.finalize_backward()
    with pytest.raises(RuntimeError) as caught:
        watch.trace()
    return str(caught.value)


@pytest.mark.skipif(not hasattr(FSDPModule, "finalize_backward"), reason="newer torch has it")
def test_a_backward_that_ends_by_hand_is_no_step(two: Found) -> None:
    for error in (one["finalized_by_hand"] for one in two):
        assert "did not reduce all gradients" in error and "set_manual_backward_finalization" in error


class Backwards(nn.Module):
    """Calls its layers in another order than it has them, and one of them not at all."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.called = [3, 0, 1] if unused else [3, 0, 1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.called:
            x = torch.relu(self.layers[index](x))
        return x


def in_another_order(rank: int, unused: bool) -> str:
    model = ab.shard(Backwards(unused), init_device_mesh("cpu", (2,)))
    watch = ab.watch(model)
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
    try:
        watch.explain(Links(ab.Network.linear(2, 1e-4, 0.0), overlaps=False))
    except RuntimeError as error:
        return str(error)
    return " ".join(watch.plan.names)


def test_units_are_in_the_order_of_forward_and_one_that_is_not_called_is_named(two: Found) -> None:
    names, error = two[0]["in another order"]
    assert names == "layers.3 layers.0 layers.1 layers.2"
    assert "layers.2 was not called in the last forward: leave it out" in error


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match="no units to watch"):
        ab.watch(nn.Linear(2, 2))
