"""A small model that FSDP2 shards inside each of two nodes, trained through ``ab.replicate`` or as stock HSDP."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_state

import anabranch as ab
from anabranch.fsdp.torch_internals import parameter_groups

WIDTH, BLOCKS, BATCH = 24, 3, 6
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def two_nodes() -> DeviceMesh:
    """Nodes of as many ranks as there are, halved."""
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


class Block(nn.Module):
    """Sizes that two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(WIDTH, WIDTH + 1),
            nn.LayerNorm(WIDTH + 1),
            nn.Linear(WIDTH + 1, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.as_tensor(self.down(torch.relu(self.norm(self.up(x)))))


def model_of(mesh: DeviceMesh, seed: int = 0, policy: MixedPrecisionPolicy | None = None) -> nn.Sequential:
    """A unit per block, and one for the rest."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, WIDTH), *(Block() for _ in range(BLOCKS)))
    options: dict[str, Any] = {} if policy is None else {"mp_policy": policy}
    for block in list(model)[1:]:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def batch_of(step: int) -> torch.Tensor:
    """This rank's."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(BATCH, 7, generator=generator)


def train(model: nn.Module, steps: Sequence[int], optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """Train some steps by SGD; losses of this rank."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in steps:
        loss = model(batch_of(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def groups_of(model: nn.Module) -> list[Any]:
    """FSDP2's own record of each unit, once."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return list({id(group): group for unit in units for group in parameter_groups(unit)}.values())


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's shards."""
    return {name: parameter.to_local().detach().clone() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether these shards are the same bits."""
    return all(torch.equal(weight, other[name]) for name, weight in one.items())


def oktopk(density: float = 0.1, **options: Any) -> ab.OkTopk:
    return ab.OkTopk(density=density, warmup_steps=0, deterministic=True, **options)


@contextmanager
def without(model: nn.Module, part: str) -> Iterator[None]:
    """A context in which FSDP2's own objects lack this part, as if this torch had it elsewhere."""
    units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    states = [unit._get_fsdp_state() for unit in units]
    groups = groups_of(model)
    owners = [*states, *(state._state_ctx for state in states), *groups, *(p for g in groups for p in g.fsdp_params)]
    removed: list[tuple[Any, Any]] = []
    for owner in owners:
        if hasattr(owner, part):
            holder = owner if part in vars(owner) else type(owner)  # of the class: a property
            removed.append((holder, vars(holder)[part]))
            delattr(holder, part)
    assert removed, f"nothing has {part}"
    yield
    for holder, value in removed:
        setattr(holder, part, value)


def refused(function: Callable[[], object]) -> str:
    """What the RuntimeError of this function says."""
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return ""


def as_before_torch_2_13() -> None:
    """From now on this process takes its FSDP2 for an older one, which casts only for the first module of a group."""

    def older(modules: object, pre_hook: object, post_hook: object, modules_to_run: object) -> None:
        raise AssertionError("a group of modules")

    _fsdp_state._register_group_forward_hooks = older  # type: ignore[assignment]
