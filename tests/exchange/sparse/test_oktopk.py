"""The dispatch between the three versions of the exchange, and what they promise on real ranks."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.virtual import VirtualWorld

from anabranch.exchange.communicator import Communicator
from anabranch.exchange.sparse import oktopk
from anabranch.exchange.sparse.exact_exchange import exact_exchange
from anabranch.exchange.sparse.fixed_exchange import fixed_exchange
from anabranch.exchange.sparse.oktopk import exchange, version_for
from anabranch.values.kinds.options import OkTopk
from exchange.sparse.worlds import EXCHANGES, OK_TOPK, check_narrow_steps, check_overflow, gradients, states
from ranks import on_ranks

NUMEL, DENSITY = 900, 0.02
SETTINGS = OkTopk(start_density=0.2, decay_steps=2, region_period=2, threshold_period=2)
SPARSE = Path(oktopk.__file__).parent
VERSIONS = {"exact_exchange", "fixed_exchange", "triton_exchange"}


def imported(path: Path, lazily: bool = True) -> set[str]:
    """Every module that a file imports, also inside functions; or only when it is itself imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree) if lazily else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_versions_do_not_import_each_other_and_only_the_dispatcher_imports_them() -> None:
    modules = {f"anabranch.exchange.sparse.{name}" for name in VERSIONS}
    users = {path.name for path in SPARSE.rglob("*.py") if modules & imported(path)}
    assert users == {"oktopk.py"}
    assert modules <= imported(SPARSE / "oktopk.py")


def test_only_the_gpu_version_needs_triton_and_is_imported_lazily() -> None:
    users = {path.name for path in SPARSE.rglob("*.py") if "triton" in imported(path)}
    assert users == {"triton_exchange.py", "kernels.py", "packing.py"}
    eagerly = imported(SPARSE / "oktopk.py", lazily=False) | imported(SPARSE.parent / "interface.py", lazily=False)
    assert not any(name.startswith("triton") or "triton_exchange" in name for name in eagerly)


def test_the_version_depends_on_device_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    host, device = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr("anabranch.exchange.interface._has_triton", lambda: False)
    assert version_for(host, OkTopk()) is version_for(device, OkTopk(exact=True)) is exact_exchange
    assert version_for(device, OkTopk()) is version_for(device, OkTopk(deterministic=True)) is fixed_exchange


def schedule(rank: int) -> dict[str, Any]:
    """A falling density, then NaN on one rank."""
    assert dist.group.WORLD is not None
    comm, size = Communicator(dist.group.WORLD), dist.get_world_size()
    state, shares, conserved = states(size, NUMEL)[rank], [], []
    for number in range(7):
        gradient = gradients(size, NUMEL, number)[rank]
        before = (gradient + state.residual).double()
        for work in exchange(gradient, state, comm, float(size), DENSITY, SETTINGS):
            work.wait()
        balance = before - state.residual.double()
        dist.all_reduce(balance)
        conserved.append(torch.allclose(balance, gradient.double() * size, rtol=1e-5, atol=1e-5))
        shares.append(float((gradient != 0).double().mean()))
    poisoned = gradients(size, NUMEL, 8)[rank]
    if rank == 0:
        poisoned[3] = float("nan")
    before = state.residual.clone()
    for work in exchange(poisoned, state, comm, float(size), DENSITY, SETTINGS):
        work.wait()
    same = torch.equal(before, state.residual)
    return {"shares": shares, "conserved": conserved, "nan": bool(poisoned.isnan().all()), "same": same}


def test_a_falling_density_and_a_poisoned_step_on_real_ranks() -> None:
    for answer in on_ranks(schedule, 2):
        assert 0.1 < answer["shares"][0] < 0.3
        assert answer["shares"][-1] == pytest.approx(DENSITY, rel=0.25)
        assert all(answer["conserved"])
        assert answer["nan"]
        assert answer["same"]


def test_wide_gradients_are_refused() -> None:
    world, state = VirtualWorld(1), states(1, 4)[0]
    with pytest.raises(ValueError, match=r"float64: expected float32, bfloat16 or float16"):
        world.run([exchange(torch.ones(4, dtype=torch.float64), state, world.comms[0], 1.0, 0.5, OkTopk())])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OK_TOPK)
def test_gradients_of_16_bits_lose_nothing_but_the_rounding_of_averages(name: str, dtype: torch.dtype) -> None:
    check_narrow_steps(EXCHANGES[name], dtype, torch.device("cpu"))


@pytest.mark.parametrize("name", OK_TOPK)
def test_what_float16_cannot_hold_of_an_average_comes_later(name: str) -> None:
    check_overflow(EXCHANGES[name], torch.device("cpu"))


def test_an_empty_bucket_sends_nothing() -> None:
    world, state = VirtualWorld(2), states(2, 0)
    world.run([exchange(torch.zeros(0), s, c, 2.0, 0.5, OkTopk()) for s, c in zip(state, world.comms, strict=True)])
    assert world.byte_counts.phases == []
