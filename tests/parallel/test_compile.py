"""torch.compile in the forms that people use, against plain DDP, while layouts change underneath."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anabranch import DataParallel
from parallel.twins import WIDTH, Feature, batch, steps, twins
from ranks import on_ranks


class Net(nn.Module):
    """With a forward of its own: a bare Sequential under DDP is not compiled at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def compiled(rank: int, form: str, optimize_ddp: bool) -> dict[str, Any]:
    import torch._dynamo

    torch._dynamo.config.optimize_ddp = optimize_ddp
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch.manual_seed(7)
    theirs = DistributedDataParallel(Net())
    torch.manual_seed(7)
    net = Net()
    if form == "net.compile()":
        net.compile(backend=backend)
    wrapped: Any = torch.compile(net, backend=backend) if form == "DP(compile(net))" else net
    _, made = twins(Feature(lambda: wrapped), "plans again and again")
    ours: Any = torch.compile(made, backend=backend) if form == "compile(DP)" else made
    apart, counts = [], []
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (theirs, made)]
    for step in steps(made, 2):
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
        expected, found = list(theirs.parameters()), list(made.parameters())
        for a, b in zip(expected, found, strict=True):
            assert a.grad is not None and b.grad is not None
            if not torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-7):
                apart.append(step)
        counts.append(len(graphs))
    assert isinstance(made, DataParallel)
    return {"apart": apart, "graphs": counts, "planned": "predicted" in made.explain()}


@pytest.mark.campaign_but_first
@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "optimize_ddp"),
    [("compile(DP)", True), ("compile(DP)", False), ("DP(compile(net))", True), ("net.compile()", True)],
)
def test_compiled_forms(form: str, optimize_ddp: bool) -> None:
    for answer in on_ranks(compiled, 2, form, optimize_ddp, timeout_s=100):
        assert answer["apart"] == []
        assert answer["planned"]
        assert answer["graphs"][0] >= 1, "nothing was compiled"
        assert answer["graphs"][-1] == answer["graphs"][2], "a new layout must not compile anything again"
