"""Behaviours with activation checkpoints: layers that are run once, twice, by turns, and with shared weights."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallel.twins import WIDTH
from torch_suite.observed import Observe, training


class Checkpointed(nn.Module):
    """Two layers; ``uses`` says how often the second is run, each time under a checkpoint."""

    def __init__(self, reentrant: bool, uses: int = 1, shared: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if shared:
            self.first.weight = self.second.weight
        if unused:
            self.third = nn.Linear(WIDTH, WIDTH)
        self.reentrant, self.uses = reentrant, uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        for _ in range(self.uses):
            x = checkpoint(self.second, x, use_reentrant=self.reentrant)
        return x


class ByTurns(Checkpointed):
    """Another layer at every step."""

    def __init__(self, shared: bool) -> None:
        super().__init__(reentrant=False, shared=shared)
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        result: torch.Tensor = checkpoint(self.first if self.count % 2 else self.second, x, use_reentrant=False)
        return result


def behaviours() -> Iterator[tuple[str, Observe]]:
    """Every combination that torch tests, the ones that must fail too."""
    for reentrant, views, static in product((False, True), repeat=3):
        kind = "reentrant" if reentrant else "non_reentrant"
        end = f"{kind}{'_views' if views else ''}{'_static' if static else ''}"
        options = {"gradient_as_bucket_view": views, "static_graph": static}
        for uses, count in ((1, "once"), (2, "twice")):
            for shared in (False, True):

                def build(reentrant: bool = reentrant, uses: int = uses, shared: bool = shared) -> nn.Module:
                    return Checkpointed(reentrant, uses, shared)

                yield f"checkpoint_{count}{'_shared' if shared else ''}_{end}", training(build, **options)

        def with_unused(reentrant: bool = reentrant) -> nn.Module:
            return Checkpointed(reentrant, unused=True)

        yield f"checkpoint_unused_{end}", training(with_unused, find_unused_parameters=True, **options)
    for shared, views in product((False, True), repeat=2):

        def by_turns(shared: bool = shared) -> nn.Module:
            return ByTurns(shared)

        name = f"checkpoint_by_turns{'_shared' if shared else ''}{'_views' if views else ''}"
        yield name, training(by_turns, find_unused_parameters=True, gradient_as_bucket_view=views)
