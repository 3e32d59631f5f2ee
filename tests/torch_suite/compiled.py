"""Behaviours of compiled models: whether they are split (plans split elsewhere than DDP), and what they compute."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from parallel.twins import WIDTH, batch, sgd
from torch_suite.observed import Observe, Wrap

FORMS = ("compile_ddp", "ddp_of_compiled", "compiled_in_place")


class Deep(nn.Module):
    """Layers of 1 MiB each, which is the least that DDP's first bucket holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 512)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).relu()
        return x


def compiled(wrap: Wrap, form: str, optimize_ddp: bool, bucket_cap_mb: float | None) -> list[Any]:
    """Whether the backend is given several graphs, and the losses."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = optimize_ddp
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    net: Any = Deep()
    if form == "ddp_of_compiled":
        net = torch.compile(net, backend=backend)
    if form == "compiled_in_place":
        net.compile(backend=backend)
    wrapped = wrap(net, bucket_cap_mb=bucket_cap_mb)
    model: Any = torch.compile(wrapped, backend=backend) if form == "compile_ddp" else wrapped
    optimizer = sgd(wrapped)
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [len(graphs) > 1, *losses]


def behaviours() -> Iterator[tuple[str, Observe]]:
    """Each form with several buckets; one in one bucket, and one that is not split."""
    variants = [*((form, True, 1.0) for form in FORMS), ("compile_ddp", True, None), ("compile_ddp", False, 1.0)]
    for form, optimize_ddp, cap in variants:
        name = f"{form}{'_split' if optimize_ddp else ''}{'_small_buckets' if cap else ''}"

        def observe(wrap: Wrap, form: str = form, split: bool = optimize_ddp, cap: float | None = cap) -> list[Any]:
            return compiled(wrap, form, split, cap)

        yield name, observe
