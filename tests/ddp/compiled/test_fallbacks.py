"""Where the plan cannot cut graphs, training goes on, and explain() says what stands in the way and what would help."""

import warnings
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch._dynamo
import torch._dynamo.backends.distributed as torch_cutter
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from anabranch import DataParallel
from ddp.compiled.models import LAYERS, WIDTH, Log, Net, compiled, furthest, inputs, pair
from ddp.compiled.test_training import in_pairs
from parallel.twins import SCENARIOS, ring
from ranks import RankError, on_ranks

STEPS = 24
BY_OPTIONS: dict[str, dict[str, Any]] = {  # CUDA graphs
    "reduce-overhead": {"mode": "reduce-overhead"},
    "triton.cudagraphs": {"options": {"triton.cudagraphs": True}},
}
OURS: dict[str, Any] = {"profile_steps": 2, "lanes": 1, "policy": SCENARIOS["keeps the plan"]}


class Breaks(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: LAYERS // 2]:
            x = layer(x).relu()
        torch._dynamo.graph_break()
        for layer in self.layers[LAYERS // 2 :]:
            x = layer(x).relu()
        result: torch.Tensor = self.norm(x)
        return result


class Stream(Net):
    """Adds in place to what the first layer made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        for layer in self.layers:
            x += layer(x.clone())
        result: torch.Tensor = self.norm(x)
        return result


class Bends(Net):
    """Has activations that cost little to compute again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sin().cos()
        result: torch.Tensor = self.norm(x)
        return result


class Recomputes(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: layer(x).sin().cos(), x, use_reentrant=False)
        result: torch.Tensor = self.norm(x)
        return result


class Autocasts(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = super().forward(x)
        return x.float()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x).tanh()
        return result


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


MODELS = {model.__name__: model for model in (Net, Breaks, Stream, Bends, Recomputes, Autocasts, Blocks)}


def run(rank: int, model: str, how: str) -> dict[str, Any]:
    """Train some steps beside an eager DDP."""
    warnings.simplefilter("ignore")  # torch's own, inside its compiler
    torch._dynamo.config.optimize_ddp = {"not cut": False, "python": "python_reducer"}.get(how, True)  # type: ignore[assignment]
    if how == "other torch":
        split_compiler: Any = torch_cutter.SubmodCompiler

        class Renamed(split_compiler):  # type: ignore[misc]
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)

        torch_cutter.SubmodCompiler = Renamed  # type: ignore[misc,assignment]
    log = Log(recomputes=how == "partitioner")
    theirs, net = pair(MODELS[model])
    planner = in_pairs if isinstance(net, Net) else "by_bytes"
    order = "blocks" if "regional" in how else "compile(DP)"
    blocks: Any = net.blocks if "regional" in how else ()
    for number, block in enumerate(blocks):
        if how == "regional":
            block.compile(backend=log)
        else:
            blocks[number] = torch.compile(block, backend=log)
    if how in BY_OPTIONS or how == "fullgraph":
        options = BY_OPTIONS.get(how, {"fullgraph": True, "backend": log})
        order, net = "made", cast(nn.Module, torch.compile(net, **options))
    made, called = compiled(net, order, log, planner=planner, network=ring(), **OURS)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (theirs, made)]
    if how == "dynamic=True":
        called = cast(nn.Module, torch.compile(made, backend=log, dynamic=True))
    for log.step in range(STEPS):
        log.events.clear()
        rows = 8 + (log.step % 3 if how == "dynamic" else 0)
        for each, optimizer in zip((theirs, called), optimizers, strict=True):
            optimizer.zero_grad()
            each(inputs(rank, log.step, rows)).square().mean().backward()
            optimizer.step()
        if how == "evaluates":
            with torch.no_grad():
                called(inputs(rank, log.step, 3))
    return {
        "apart": furthest(theirs, made),
        "compiled": log.compiled,
        "explained": made.explain(),
        "backwards": log.events.count("backward"),  # of the last step
        "recomputed": log.recomputed,
    }


@pytest.mark.slow
@pytest.mark.campaign_but_first
@pytest.mark.parametrize(
    ("model", "how", "sentence"),
    [
        ("Net", "not cut", 'optimize_ddp is "no_optimization", so torch cuts no graph'),
        ("Net", "python", 'No plan: torch._dynamo.config.optimize_ddp is "python_reducer"'),
        ("Net", "reduce-overhead", 'the modes "default" and "max-autotune-no-cudagraphs" let the plan cut'),
        ("Net", "triton.cudagraphs", 'mode="reduce-overhead" or the option "triton.cudagraphs"'),
        ("Net", "dynamic", "torch.compile(dynamic=False), let the plan cut it"),
        ("Net", "dynamic=True", "torch.compile(dynamic=False), let the plan cut it"),
        ("Stream", "", "writing x = x + y lets the plan cut it"),
        (
            "Net",
            "other torch",
            "torch cuts graphs by bytes, and not where buckets end, since anabranch does not fit torch",
        ),
        ("Blocks", "regional", "(their gradients leave block by block)"),
        ("Blocks", "regional, in their places", "(their gradients leave block by block)"),
    ],
)
def test_what_stands_in_the_way(model: str, how: str, sentence: str) -> None:
    for answer in on_ranks(run, 2, model, how, timeout_s=90):
        assert answer["apart"] < 1e-5
        assert sentence in answer["explained"]
        assert max(answer["compiled"], default=0) <= 1, "nothing is compiled again for a plan"
        assert how != "dynamic" or answer["compiled"].count(1) == 1, "cut as DDP's would be: these are one bucket"
        assert "regional" not in how or answer["backwards"] == LAYERS, "gradients leave block by block"


def refused(rank: int) -> list[bool]:
    """Whether torch refuses a wrapper as one graph: stock DDP, and DataParallel."""
    wrappers = [DistributedDataParallel(Net()), DataParallel(Net())]
    found = []
    for wrapper in wrappers:
        called = torch.compile(wrapper, fullgraph=True, backend=Log())
        try:
            called(inputs(rank, 0))
            found.append(False)
        except torch._dynamo.exc.Unsupported:
            found.append(True)
    return found


def test_a_wrapper_as_one_graph_is_refused_as_for_ddp() -> None:
    assert on_ranks(refused, 2) == [[True, True]] * 2


@pytest.mark.campaign_but_first
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("Breaks", ""),
        ("Recomputes", ""),
        ("Bends", "partitioner"),
        ("Autocasts", ""),
        ("Net", "fullgraph"),
        ("Net", "evaluates"),
    ],
)
def test_what_does_not(model: str, how: str) -> None:
    for answer in on_ranks(run, 2, model, how, timeout_s=90):
        assert answer["apart"] < 1e-5
        first = answer["compiled"].count(0)
        assert first == LAYERS + (how == "evaluates")  # the graph without gradients is not cut
        assert len(set(answer["compiled"])) == 2, "graphs are compiled once more, for the plan"
        assert how != "partitioner" or answer["recomputed"] >= 2 * LAYERS, "in both versions, as without cuts"


@dataclass
class Fails(Log):
    """A backend that cannot compile from this step on, forward or backward."""

    fails_from: int = STEPS
    in_backward: bool = False

    def __call__(self, graph: Any, inputs: Any) -> Any:
        if self.step < self.fails_from:
            return super().__call__(graph, inputs)
        if self.in_backward:
            return aot_autograd(fw_compiler=lambda module, _: make_boxed_func(module.forward), bw_compiler=too_much)(
                graph, inputs
            )
        return too_much(graph, inputs)


def too_much(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("this graph is too much for me")


def broken(rank: int, fails_from: int, in_backward: bool) -> dict[str, Any]:
    """Rank 1's backend fails, at once or when graphs are compiled for the plan."""
    _, net = pair()
    backend = Fails(fails_from=fails_from, in_backward=in_backward) if rank == 1 else Log()
    _made, called = compiled(net, "compile(DP)", backend, planner=in_pairs, network=ring(), **OURS)
    for backend.step in range(STEPS):
        called(inputs(rank, backend.step)).square().mean().backward()
    return {}


@pytest.mark.slow
@pytest.mark.campaign_but_first
@pytest.mark.parametrize(("fails_from", "in_backward"), [(0, False), (1, False), (1, True)])
def test_a_compile_error_is_raised_and_the_other_rank_does_not_hang(fails_from: int, in_backward: bool) -> None:
    with pytest.raises(RankError) as failed:
        on_ranks(broken, 2, fails_from, in_backward, timeout_s=90)
    first, _, other = str(failed.value).partition("rank 0 failed")
    assert "rank 1 failed" in first and "this graph is too much for me" in first
    assert "by peer" in other, "it gets the error of the process group, at once"
