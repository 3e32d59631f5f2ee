"""Links inside a host of the lab that are copies in the memory of its GPU, beside NCCL's over the host's loopback.

One lab of two hosts with two ranks each runs this file as its program, on one GPU; the tests read what the ranks found.

    pytest -m gpu tests/tools/lab/test_gpu.py

The program also runs on CPUs, where files in memory take the place of the GPU's:

    ANABRANCH_LAB_INSIDE=memory PYTHONPATH=src/anabranch/tools/lab/startup:src:tests \\
        anabranch lab --hosts 2 --ranks-per-host 2 --rate unshaped -- python tests/tools/lab/test_gpu.py FOLDER
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from anabranch.exchange.interface import all_gather
from anabranch.observe.measure import drive, reduce_scatter
from anabranch.tools.cli.ranks import join
from anabranch.tools.lab.inside import host_memory
from gpu import ON_GPU, no_waiting

NODES, RANKS = 2, 4
LAB_S = 75  # then it ends
LARGE = 1 << 24  # elements
COUNTERS = Path("/proc/net/dev")  # of this rank's host; what is in /sys/class/net is the machine's

# ------------------------------------------------------------------------------------------------ the ranks' program


def by_loopback(function: Callable[[], Any]) -> Any:
    """What a function finds where collectives are the process group's own."""
    with patch.object(host_memory, "is_on_one_host", return_value=False):
        return function()


def results(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, numel: int) -> list[torch.Tensor]:
    """What an all-to-all, an all-gather and a reduce-scatter give, of equal noise in every call."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    given = (100 * torch.randn(numel * group.size(), generator=generator)).to(device, dtype)
    received, gathered, total = torch.empty_like(given), torch.empty_like(given), given.clone()
    dist.all_to_all_single(received, given, group=group)
    all_gather(gathered, given[:numel], group, async_op=False)
    drive(reduce_scatter(total, group, 1.0))
    return [received, gathered, total.chunk(group.size())[group.rank()]]


def equal(group: dist.ProcessGroup, device: torch.device) -> dict[str, bool]:
    """Whether copies give the same bits as NCCL, by dtype and size; two ranks have one order in which they add."""
    found = {}
    for dtype, numel in ((torch.float32, 5), (torch.bfloat16, 4099), (torch.uint8, 7), (torch.float32, 1 << 20)):
        copied = results(group, device, dtype, numel)
        sent = by_loopback(partial(results, group, device, dtype, numel))
        found[f"{dtype}, {numel}"] = all(map(torch.equal, copied, sent))
    return found


def on_streams(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether messages on two streams at the same time stay apart, and the host waits for none of them."""
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    given = [torch.full((LARGE,), group.rank() + 10.0 * number, device=device) for number in range(2)]
    received = [torch.empty_like(one) for one in given]
    torch.cuda.synchronize(device)
    for turn in range(3):
        with nullcontext() if turn == 0 else no_waiting():  # in the first turn windows are made
            for stream, target, own in zip(streams, received, given, strict=True):
                with torch.cuda.stream(stream):
                    dist.all_to_all_single(target, own, group=group)
    torch.cuda.synchronize(device)
    return all(
        bool((part == rank + 10.0 * number).all())
        for number, whole in enumerate(received)
        for rank, part in enumerate(whole.chunk(group.size()))
    )


def over_loopback(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Bytes that pass the host's loopback, and milliseconds, for a large all-to-all either way."""
    given = torch.ones(LARGE, device=device)
    received = torch.empty_like(given)

    def measured() -> tuple[int, float]:
        dist.all_to_all_single(received, given, group=group)  # connections and windows are made
        settle(device)
        before, began = loopback_nbytes(), perf_counter()
        for _ in range(3):
            dist.all_to_all_single(received, given, group=group)
        settle(device)
        return loopback_nbytes() - before, (perf_counter() - began) / 3 * 1e3

    (copied, copied_ms), (sent, sent_ms) = measured(), by_loopback(measured)
    return {"copied": copied, "sent": sent, "copied_ms": copied_ms, "sent_ms": sent_ms}


def loopback_nbytes() -> int:
    """What has passed it so far."""
    return int(COUNTERS.read_text().partition("lo:")[2].split()[0])


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def losses(mesh: Any, device: torch.device) -> list[float]:
    """Of a small model that FSDP2 shards inside nodes."""
    torch.manual_seed(0)
    with device:
        model = nn.Sequential(nn.Linear(7, 512), nn.ReLU(), nn.Linear(512, 513), nn.ReLU(), nn.Linear(513, 7))
    for layer in list(model)[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(6):
        loss = model(torch.randn(32, 7, generator=generator).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    taken: list[float] = torch.stack(found).tolist()
    return taken


def program(folder: Path) -> None:
    """The checks of one rank, written to a file."""
    device = join(None)
    mesh = init_device_mesh(device.type, (NODES, RANKS // NODES), mesh_dim_names=("replicate", "shard"))
    inside = mesh.get_group(1)
    found = {
        "equal": equal(inside, device),
        "on_streams": on_streams(inside, device) if device.type == "cuda" else True,
        "over_loopback": over_loopback(inside, device),
        "losses": [losses(mesh, device), by_loopback(lambda: losses(mesh, device))],
    }
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    if dist.get_rank() == 0:
        print(found["over_loopback"], flush=True)
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank found."""
    folder = tmp_path_factory.mktemp("inside")
    options = f"--hosts {NODES} --ranks-per-host {RANKS // NODES} --rate unshaped --inside memory --timeout {LAB_S}"
    command = [sys.executable, "-m", "anabranch", "lab", *options.split(), "--backend", "nccl", "--"]
    done = subprocess.run(
        [*command, sys.executable, __file__, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"},
        timeout=LAB_S + 30,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]


pytestmark = ON_GPU


def test_copies_give_the_same_bits_as_nccl(found: list[dict[str, Any]]) -> None:
    for result in found:
        assert all(result["equal"].values()), result["equal"]


def test_messages_on_two_streams_stay_apart_and_the_host_waits_for_none(found: list[dict[str, Any]]) -> None:
    assert all(result["on_streams"] for result in found)


def test_nothing_passes_the_loopback(found: list[dict[str, Any]]) -> None:
    for result in found:
        assert result["over_loopback"]["copied"] < LARGE < result["over_loopback"]["sent"]


def test_hsdp_trains_to_the_same_losses(found: list[dict[str, Any]]) -> None:
    for result in found:
        copied, sent = result["losses"]
        assert copied == sent


if __name__ == "__main__":
    program(Path(sys.argv[1]))
