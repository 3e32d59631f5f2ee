"""What the account counts for a quantised exchange is what the exchange holds."""

import pytest
import torch

from anabranch.exchange.contracts import Steps
from anabranch.exchange.quantised.exchange import exchange
from anabranch.planning.memory.account import WAYS, Setting, modes_of, predict, quantised_messages
from anabranch.tools.bench.virtual import VirtualWorld
from anabranch.values.kinds.formats import FORMATS
from anabranch.values.kinds.names import COMPRESSED
from anabranch.values.kinds.options import Quantised
from planning.memory.test_account import MIB, small

N = 160_000_000  # bytes of the gradients of ``small``
QUIET = Setting(ranks=4, blas_workspace_nbytes=0)


def held(steps: Steps, buffer: torch.Tensor, counts: list[dict[str, int]]) -> Steps:
    """The same steps; before each, the bytes of all tensors that the exchange holds beside the bucket, by name."""
    for work in steps:
        local = steps.gi_frame.f_locals  # type: ignore[attr-defined]  # of a generator
        tensors = {name: value for name, value in local.items() if isinstance(value, torch.Tensor)}
        counts.append({name: t.nbytes for name, t in tensors.items() if t is not buffer and name != "residual"})
        yield work


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("ranks", "numel"), [(2, 4096), (4, 10_000), (8, 129)])
def test_the_account_is_what_an_exchange_holds(kind: str, ranks: int, numel: int) -> None:
    world, form = VirtualWorld(ranks), FORMATS[kind]
    counts: list[dict[str, int]] = []
    running = []
    for comm in world.comms:
        buffer = torch.randn(numel)
        residual = torch.zeros(numel) if Quantised(kind).keeps_residual else None
        running.append(held(exchange(buffer, residual, comm, float(ranks), form), buffer, counts))
    world.run(running)
    largest = max(counts, key=lambda count: sum(count.values()))
    of_owner = {"rounding_error"} if Quantised(kind).keeps_residual else set()
    assert set(largest) == {"sent", "received", "message", "gathered"} | of_owner
    account = quantised_messages(kind, numel, ranks, Quantised(kind).keeps_residual)
    assert account["send"] == largest["sent"] + largest["message"]
    assert account["receive"] == largest["received"] + largest["gathered"]
    assert account["workspace"] == largest.get("rounding_error", 0)


def test_rounding_needs_messages_and_only_int4_a_residual() -> None:
    found = {kind: predict(small(activations=MIB), kind, QUIET).kinds for kind in COMPRESSED}
    assert [found[kind]["residual"] for kind in COMPRESSED] == [0, 0, N]
    assert all(found[kind]["gradients"] == N + 40_000_000 for kind in COMPRESSED)
    # Two buckets of 10 M values are under way, each with five messages to send and eight to receive.
    assert found["int8"]["send"] + found["int8"]["receive"] == pytest.approx(2 * 13 * 2_500_000 * 65 / 64, rel=1e-3)
    assert found["bf16"]["send"] + found["bf16"]["receive"] == pytest.approx(2 * 13 * 5_000_000, rel=1e-3)
    assert found["int4"]["send"] < found["int8"]["send"] < found["bf16"]["send"]


def test_lean_with_int8_holds_neither_gradients_nor_residual() -> None:
    profile = small(activations=MIB, layers=16)
    ddp, lean, oktopk = (predict(profile, mode, QUIET) for mode in ("ddp", "lean, int8", "lean"))
    assert lean.kinds["residual"] == 0 and lean.kinds["gradients"] == 3 * 40_000_000  # two slots, and autograd's own
    assert lean.nbytes < ddp.nbytes and lean.nbytes < oktopk.nbytes


def test_the_residual_of_int4_can_be_on_the_host() -> None:
    place, host = (predict(small(activations=MIB), mode, QUIET) for mode in ("lean, int4", "lean, int4, host"))
    assert place.kinds["residual"] == N and place.host_nbytes == 0
    assert host.kinds["residual"] == N // 2 and host.host_nbytes == N


def test_modes_by_exchange() -> None:
    rounded = ["residuals bf16", "residuals int8"]
    assert modes_of("dense") == ["lean, dense"]
    assert modes_of("oktopk") == ["oktopk", "lean", "lean, host", *(f"lean, {how}" for how in rounded)]
    assert modes_of("int8") == ["int8", "lean, int8"]
    assert modes_of("int4") == ["int4", "lean, int4", "lean, int4, host", *(f"lean, int4, {how}" for how in rounded)]
    assert all(mode in WAYS for kind in COMPRESSED for mode in modes_of(kind))
