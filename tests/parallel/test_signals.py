"""Ctrl-C ends a training: what a signal handler raises is raised in the training loop, wherever the signal arrives."""

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from anabranch.parallel import DataParallel
from ranks import CONTEXT, patience

INTERRUPTED = 7  # the exit code of a rank whose training loop saw KeyboardInterrupt
TRIES = 6
DEADLINE_S = 20.0  # a rank that has lost the signal trains until it is killed


def train_for_ever(rank: int, rendezvous: Path, ready: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    model = DataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))))
    step = 0
    try:
        while True:
            model(torch.ones(256, 256)).square().mean().backward()
            step += 1
            if step == 12:
                ready.send_bytes(b"ready")
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)


@pytest.mark.slow
def test_ctrl_c_ends_both_ranks(tmp_path: Path) -> None:
    for attempt in range(TRIES):
        reader, writer = CONTEXT.Pipe(duplex=False)
        rendezvous = tmp_path / str(attempt)
        ranks = [CONTEXT.Process(target=train_for_ever, args=(rank, rendezvous, writer)) for rank in range(2)]
        try:
            for process in ranks:
                process.start()
            for _ in ranks:
                assert reader.poll(DEADLINE_S * patience()), "no rank has trained"
                reader.recv_bytes()
            for process in ranks:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGINT)
            for process in ranks:
                process.join(DEADLINE_S * patience())
            codes = [process.exitcode for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.join()
        # 1: the other rank ended first, and this one's message to it failed.
        assert INTERRUPTED in codes and set(codes) <= {INTERRUPTED, 1}, f"try {attempt}: {codes}"
