"""Ranks that die, fail or stall in mid-step: the others say what they waited for, in time, and come to an end.

Every rank is a Python process of its own, so that the end of the interpreter, with its threads and groups, is part of
the test: ranks forked from a server end in another way. This file is also the program that each of them runs.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn

import anabranch as ab
from ranks import patience

RANKS = 3
VICTIM = 1
TIMEOUT_S = 10.0  # of the process group, on an idle machine
TIMEOUT_VARIABLE = "ANABRANCH_TESTS_TIMEOUT_S"
START_S = 60.0  # until the fault
MARGIN_S = 20.0  # from the group's timeout to the end of the last survivor
FAULT_STEP = 6  # the plan is in force from the first step on
LAYERS = 4
PLAN = ab.Plan(
    tuple(
        ab.Bucket((f"{layer}.weight", f"{layer}.bias"), lane=layer % 2, collective="bf16" if layer == 2 else "dense")
        for layer in reversed(range(LAYERS))
    )
)


def die(gradient: torch.Tensor) -> NoReturn:
    """As the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def fail(gradient: torch.Tensor) -> NoReturn:
    """As a bug in a layer's backward would."""
    raise ArithmeticError("a bug in backward")


def stall(gradient: torch.Tensor) -> None:
    """As a rank whose disk or data loader hangs."""
    time.sleep(600)


def none(gradient: torch.Tensor) -> None:
    """Nothing happens, and every rank ends after its last step."""


FAULTS = {"die": die, "fail": fail, "stall": stall, "none": none}


MEMORIES = {"plain": None, "lean": ab.Lean(lambda params: torch.optim.SGD(params, lr=0.1))}


def limit() -> timedelta:
    """In a rank's process: the timeout that ``run`` has given it."""
    return timedelta(seconds=float(os.environ[TIMEOUT_VARIABLE]))


def rank_program(rank: int, folder: Path, fault: str, ending: str, memory: str) -> None:
    """Train until the fault, note what was raised, and end as told: with or without destroy_process_group()."""
    Path(folder, f"ready-{rank}").touch()  # importing may take longer than the group's timeout
    while len(list(folder.glob("ready-*"))) < RANKS:
        time.sleep(0.02)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=limit(),
    )
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
    model = ab.DataParallel(layers, plan=PLAN, memory=MEMORIES[memory])

    def trouble(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        output.register_hook(FAULTS[fault])

    try:
        for step in range(FAULT_STEP + 3):
            if step == FAULT_STEP:
                assert model.plan == PLAN
                if rank == VICTIM:  # in the middle of backward: some buckets are on their way
                    Path(folder, "fault").touch()
                    layers[LAYERS // 2 - 1].register_forward_hook(trouble)
            model(torch.randn(8, 64)).sum().backward()
    except Exception as error:
        note: dict[str, Any] = {"error": str(error), "kind": type(error).__name__}
        with suppress(Exception):
            model(torch.randn(8, 64))
            note["went_on"] = True
        Path(folder, f"rank-{rank}.json").write_text(json.dumps(note))
    if ending == "destroy":
        dist.destroy_process_group()


def run(
    folder: Path, fault: str, ending: str, memory: str, program: str = __file__, ranks: int = RANKS
) -> tuple[list[int | None], list[str], dict[int, Any]]:
    """Exit codes and stderr of all ranks, and what they noted; ranks that have not ended in time are killed."""
    path, timeout_s = os.pathsep.join(sys.path), TIMEOUT_S * patience()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", "PYTHONPATH": path}
    environment[TIMEOUT_VARIABLE] = str(timeout_s)
    processes = [
        subprocess.Popen(
            [sys.executable, program, str(rank), str(folder), fault, ending, memory],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    codes: list[int | None] = [None] * ranks
    try:
        deadline = time.monotonic() + START_S * patience()
        while not Path(folder, "fault").exists() and processes[VICTIM].poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        deadline = time.monotonic() + timeout_s + MARGIN_S * patience()
        for rank, process in enumerate(processes):
            if fault == "stall" and rank == VICTIM:
                continue
            with suppress(subprocess.TimeoutExpired):
                codes[rank] = process.wait(max(0.1, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    words = [process.communicate(timeout=10 * patience())[1] for process in processes]
    notes = {rank: folder / f"rank-{rank}.json" for rank in range(ranks)}
    return codes, words, {rank: json.loads(path.read_text()) for rank, path in notes.items() if path.exists()}


@pytest.mark.campaign_but_first
@pytest.mark.parametrize(("ending", "memory"), [("destroy", "plain"), ("exit", "plain"), ("exit", "lean")])
@pytest.mark.parametrize("fault", ["die", "fail", "stall"])
def test_survivors_say_what_they_waited_for_and_end(fault: str, ending: str, memory: str, tmp_path: Path) -> None:
    codes, words, notes = run(tmp_path, fault, ending, memory)
    survivors = [rank for rank in range(RANKS) if rank != VICTIM]
    for rank in survivors:
        assert codes[rank] == 0, f"rank {rank} ended with {codes[rank]}:\n{words[rank]}"
        note = notes[rank]
        assert note["kind"] in ("CollectiveError", "RuntimeError")
        assert "did not get through after" in note["error"] and "look for the first error" in note["error"]
        assert "bucket" in note["error"] and "gradients to" in note["error"] and "on lane" in note["error"]
        assert "went_on" not in note
    if fault == "fail":
        assert "a bug in backward" in notes[VICTIM]["error"] and codes[VICTIM] == 0, words[VICTIM]
    if fault == "die":
        assert codes[VICTIM] == -signal.SIGKILL and VICTIM not in notes


@pytest.mark.campaign
@pytest.mark.parametrize("memory", list(MEMORIES))
def test_a_program_that_forgets_to_destroy_its_groups_ends_cleanly(memory: str, tmp_path: Path) -> None:
    codes, words, notes = run(tmp_path, "none", "exit", memory)
    assert (codes, notes) == ([0] * RANKS, {}), words


if __name__ == "__main__":
    rank_program(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5])
