"""Ranks that die, fail or stall while a sharded model is trained or tried: the others get an error in time, and end.

As in ``test_faults``, every rank is a Python process of its own, and this file is the program that each of them runs.
"""

import json
import signal
import sys
import time
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import anabranch as ab
from parallel.test_faults import FAULTS, RANKS, VICTIM, limit, run

WIDTH = 32
FAULT_STEP = 6  # of a trial: it is recording
# Nodes and ranks in a node. A group of all ranks has the timeout of init_process_group() from torch, others do not.
MESHES = {"3x1": (RANKS, 1), "2x2": (2, 2)}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def rank_program(rank: int, folder: Path, fault: str, ending: str, program: str) -> None:
    """Train between the nodes of a mesh, or try plans, until the fault; note what was raised."""
    Path(folder, f"ready-{rank}").touch()  # importing may take longer than the limit
    while len(list(folder.glob("ready-*"))) < prod(MESHES.get(program, (RANKS,))):
        time.sleep(0.02)
    init_method, shape = f"file://{folder}/rendezvous", MESHES.get(program, (RANKS,))
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=prod(shape), timeout=limit())
    steps = 0

    def step(model: nn.Module) -> None:
        nonlocal steps
        steps += 1
        output = model(torch.randn(8, WIDTH))
        if rank == VICTIM and steps == FAULT_STEP:
            Path(folder, "fault").touch()
            output.register_hook(FAULTS[fault])
        output.square().mean().backward()

    try:
        if program == "trial":
            ab.find_sharding(build, init_device_mesh("cpu", shape), step)
        else:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            model = ab.shard(build(), mesh["shard"])
            ab.replicate(model, mesh, compress="int8")
            for _ in range(FAULT_STEP + 3):
                step(model)
    except Exception as error:
        note: dict[str, Any] = {"error": str(error), "notes": getattr(error, "__notes__", [])}
        Path(folder, f"rank-{rank}.json").write_text(json.dumps(note))
    time.sleep(0.5)  # torch's Gloo threads let go of FSDP2's last tensors: as Python ends, that would abort it
    if ending == "destroy":
        dist.destroy_process_group()


@pytest.mark.campaign_but_first
@pytest.mark.parametrize(
    ("program", "fault"),
    [("trial", "die"), ("trial", "fail"), *((shape, fault) for shape in MESHES for fault in ("die", "stall"))],
)
def test_survivors_get_an_error_in_time_and_end(program: str, fault: str, tmp_path: Path) -> None:
    ranks = prod(MESHES.get(program, (RANKS,)))
    codes, words, notes = run(tmp_path, fault, "destroy", program, __file__, ranks)
    for rank in (rank for rank in range(ranks) if rank != VICTIM):
        assert codes[rank] == 0, f"rank {rank} ended with {codes[rank]}:\n{words[rank]}"
        note = notes[rank]
        if program == "trial":
            (said,) = note["notes"]
            assert f"in a trial of find_sharding(), on rank {rank}" in said and "look for the first error" in said
        elif (program, rank) == ("2x2", 0):  # of the victim's node, where the messages are FSDP2's own
            assert "gloo" in note["error"]
        else:
            assert "did not get through after" in note["error"] and "between nodes (int8)" in note["error"]
    if fault == "fail":
        assert "a bug in backward" in notes[VICTIM]["error"] and codes[VICTIM] == 0, words[VICTIM]
    if fault == "die":
        assert codes[VICTIM] == -signal.SIGKILL and VICTIM not in notes


if __name__ == "__main__":
    rank_program(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5])
