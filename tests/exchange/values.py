"""Values of all ranks that every rank can make by itself."""

import torch


def values_of_ranks(numel: int, world_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What each rank has: normal values of very different magnitude."""
    values = []
    for rank in range(world_size):
        chance = torch.Generator().manual_seed(100 * numel + rank)
        scale = torch.randint(-10, 10, (numel,), generator=chance).double().exp2()
        values.append((torch.randn(numel, generator=chance).double() * scale).to(dtype))
    return values
