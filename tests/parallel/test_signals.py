"""Ctrl-C ends a training: what a signal handler raises is raised in the training loop, wherever the signal arrives."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn

from anabranch import DataParallel, Network, TuningPolicy
from ranks import CONTEXT, patience

INTERRUPTED = 7  # the exit code of a rank whose training loop saw what the handler raised
LOST = 9  # of one whose handler raised, and whose training went on until something else ended it
PEER_ENDED = 1  # of one that the handler never reached: the other rank ended first, and a message to it failed
TRIES = 10  # of each signal
WIDTH, ROWS = 512, 128  # so that most of a backward pass is in C++, where a signal waits for the next line of Python
DEADLINE_S = 120.0  # a rank that has lost the signal trains until it is killed; no load of the machine reaches it


class StopError(Exception):
    """What a program's own handler raises."""


def train_for_ever(rank: int, rendezvous: Path, number: signal.Signals, share: float) -> None:
    """Receive the signal in a backward pass, after a share of the time that the pass before has taken.

    Not before the search has ended: a step that is profiled runs Python for each gradient, which sees every signal.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.default_int_handler(number, frame)

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        """As one that saves a checkpoint, or a timeout."""
        received.append(number)
        raise StopError

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, stop)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60 * patience())
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timeout)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    too_fast = Network.ring(2, 1e-12, 1e-15)  # for any plan to be worth while
    model = DataParallel(module, network=too_fast, profile_steps=1, policy=TuningPolicy(warmup_steps=1))
    backward_s, sent = 0.0, False
    try:
        while True:
            loss = model(torch.ones(ROWS, WIDTH)).square().mean()
            if not sent and "running DDP's own" in model.explain():
                sent = True
                threading.Timer(share * backward_s, os.kill, (os.getpid(), number)).start()
            began = time.monotonic()
            loss.backward()
            backward_s = time.monotonic() - began
    except (KeyboardInterrupt, StopError):
        os._exit(INTERRUPTED)
    except Exception:
        os._exit(LOST if received else PEER_ENDED)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_both_ranks(number: signal.Signals, tmp_path: Path) -> None:
    for attempt in range(TRIES):
        arguments = tmp_path / str(attempt), number, (attempt + 0.5) / TRIES
        ranks = [CONTEXT.Process(target=train_for_ever, args=(rank, *arguments)) for rank in range(2)]
        try:
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(DEADLINE_S * patience())
            codes = [process.exitcode for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.join()
        assert INTERRUPTED in codes and set(codes) <= {INTERRUPTED, PEER_ENDED}, f"try {attempt}: {codes}"
