"""The server of ranks: it has imported torch, and forks a process for every order it reads.

A forked rank ends as a program does: it returns from ``main``, and its interpreter ends with all its threads.
Lines in: orders. Lines out: {"id": …, "pid": …} for a start, {"id": …, "code": …} for an end.
"""

import gc
import json
import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

from soak.rank import Order, run

POLL_S = 0.01


def main() -> None:
    running: dict[int, int] = {}
    waiting = b""
    while True:
        ready, _, _ = select.select([0], [], [], POLL_S)
        if ready:
            received = os.read(0, 1 << 16)
            if not received:
                break
            *lines, waiting = (waiting + received).split(b"\n")
            for line in lines:
                request = json.loads(line)
                number = request.pop("id")
                order = Order(**request)
                pid = os.fork()
                if pid == 0:
                    _become_rank(order)
                    run(order)
                    return
                running[pid] = number
                _say(id=number, pid=pid)
        _reap(running)
    for pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)  # there is nothing to clean up


def _reap(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if pid in running:
            _say(id=running.pop(pid), code=os.waitstatus_to_exitcode(status))


def _say(**facts: int) -> None:
    os.write(1, json.dumps(facts).encode() + b"\n")


def _become_rank(order: Order) -> None:
    """Let go of the server's pipes; what the rank prints goes into its folder."""
    null = os.open(os.devnull, os.O_RDONLY)
    words = os.open(Path(order.folder, f"stderr-{order.rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((null, 0), (words, 1), (words, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(words)


if __name__ == "__main__":
    import pydantic.type_adapter  # noqa: F401
    import torch._dynamo  # noqa: F401

    gc.collect()
    gc.freeze()  # the end of a rank's interpreter would visit a million objects of modules otherwise
    main()
    sys.exit()
