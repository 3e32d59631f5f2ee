"""ab.replicate: what is one step, where blocks are recomputed in backward, or used in some steps only."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

import anabranch as ab
from fsdp.small_model import model_of, train, two_nodes, weights
from ranks import on_ranks

WARMUP_STEPS, STEPS = 3, 6
CAN_RESET = hasattr(FSDPModule, "reset_iter_state")


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What every rank found, by scenario."""
    return on_ranks(scenarios, 4, timeout_s=120)


def scenarios(rank: int) -> dict[str, Any]:
    every = (recomputed, sent_in_turns, *((reset_after_an_error,) if CAN_RESET else ()))
    return {scenario.__name__: scenario(rank) for scenario in every}


class Recomputed(nn.Module):
    """A block that is computed again in backward."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def trained(mesh: DeviceMesh, where: str, reentrant: bool) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Weights and state after a warm-up and some steps; with a checkpoint around each unit, in it, or nowhere."""
    model: Any = model_of(mesh["shard"])
    compress = ab.OkTopk(density=0.1, warmup_steps=WARMUP_STEPS, deterministic=True)
    for number in range(1, len(model)):
        if where == "around":
            model[number] = Recomputed(model[number], reentrant)
        elif where == "inside":
            model[number].norm = Recomputed(model[number].norm, reentrant)
    replication = ab.replicate(model, mesh, compress=compress)
    train(model, range(STEPS))
    state = replication.state_dict()
    replication.close()
    return list(weights(model).values()), state


def recomputed(rank: int) -> list[list[Any]]:
    mesh = two_nodes()
    plain, usual = trained(mesh, "nowhere", reentrant=False)
    results = []
    for where, reentrant in product(("around", "inside"), (True, False)):
        found, state = trained(mesh, where, reentrant)
        residuals = zip(usual["residuals"].values(), state["residuals"].values(), strict=True)
        results.append(
            [
                usual["steps_trained"],
                state["steps_trained"],
                all(torch.equal(one, other) for one, other in zip(plain, found, strict=True)),
                all(torch.equal(one, other) for one, other in residuals),
            ]
        )
    return results


def test_recomputing_changes_no_bit(found: list[dict[str, Any]]) -> None:
    """A re-entrant checkpoint runs a backward inside backward: each is no step of its own."""
    assert [one["recomputed"] for one in found] == [[[STEPS, STEPS, True, True]] * 4] * 4


class Alternating(nn.Module):
    """Uses its second block in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        x = self.blocks[0](x)
        return self.blocks[1](x) if self.calls % 2 else x


def sent_in_turns(rank: int) -> list[int]:
    mesh = two_nodes()
    model = Alternating()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    replication = ab.replicate(model, mesh)
    found = []
    for step in range(4):
        train(model, [step])
        found.append(replication.metrics()["sent_nbytes"])
    return found


def test_only_what_was_sent_in_the_last_step_is_counted(found: list[dict[str, Any]]) -> None:
    for both, one, *later in (one["sent_in_turns"] for one in found):
        assert 0 < one < both and later == [both, one]


def reset_after_an_error(rank: int) -> tuple[list[float], int]:
    """A backward that fails before a unit is reduced; torch's reset_iter_state() lets training go on."""
    mesh = two_nodes()
    model: Any = model_of(mesh["shard"])
    replication = ab.replicate(model, mesh, compress=ab.OkTopk(density=0.1, warmup_steps=0, deterministic=True))

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("a bug in backward")

    handle = model[3].register_forward_hook(lambda _module, _inputs, output: output.register_hook(fail) and None)
    with pytest.raises(ArithmeticError):
        train(model, [0])
    handle.remove()
    model.reset_iter_state()
    losses = train(model, range(2))
    return losses, replication.state_dict()["steps_trained"]


def test_a_backward_that_sent_nothing_may_be_repeated_after_a_reset(found: list[dict[str, Any]]) -> None:
    if not CAN_RESET:
        pytest.skip("this torch cannot reset FSDP2")
    for losses, steps in (one["reset_after_an_error"] for one in found):
        assert len(losses) == steps == 2
