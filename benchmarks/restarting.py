"""Jobs one after another on all ranks, in worker processes that are started again where one has failed.

A rank that runs out of memory leaves the others waiting for its messages, so nothing that follows in these processes
could be trusted. Each rank therefore has a supervisor, which uses no GPU. When a worker of any rank fails, or a job
takes too long, all workers are ended, and new ones go on behind that job.
"""

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from time import monotonic, sleep

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined] # not exported to type checkers

FIRST, ATTEMPT = "BENCHMARK_FIRST_JOB", "BENCHMARK_ATTEMPT"  # in the environment of a worker
POLL_S = 0.1
KILLED_S = 60.0  # for a worker that was killed to end, and for other supervisors to leave
LONG = timedelta(hours=1)


def board() -> TCPStore:
    """In a supervisor: the store in which ranks write what they find.

    It is torchrun's own, else one of rank 0 at the port that the launcher left for it: any other port may be in use.
    """
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = os.environ["RANK"] == "0" and not of_torchrun
    return TCPStore(*_address(), int(os.environ["WORLD_SIZE"]), serves, LONG)


def joined() -> TCPStore:
    """One more connection to the store: of a worker, or of another thread of a supervisor."""
    return TCPStore(*_address(), None, False, LONG)


def _address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def group_store(store: TCPStore) -> PrefixStore:
    """In a worker: for the process group of its attempt, which must not find the addresses of workers before it."""
    return PrefixStore(f"group/{os.environ[ATTEMPT]}", store)


def worker_place() -> tuple[int, int] | None:
    """In a worker: the job to begin with, and how often workers were started before; None in a supervisor."""
    return (int(os.environ[FIRST]), int(os.environ[ATTEMPT])) if FIRST in os.environ else None


def supervised(
    command: Sequence[str],
    jobs: int,
    store: TCPStore,
    timeout_s: float,
    again: Callable[[int], bool],
    can_begin: Callable[[int], bool],
) -> Iterator[tuple[int, str | None]]:
    """Run all jobs; yields each one's number and result on rank 0, as they come; None where it has failed.

    timeout_s   for a job, from when it ``can_begin``
    again       whether a job that has failed is to be tried once more
    """
    rank, first, attempt = int(os.environ["RANK"]), 0, 0
    while first < jobs:
        worker = _started(command, first, attempt)
        try:
            begun = monotonic()
            while worker.poll() is None and not store.check([f"failed/{attempt}"]):
                if rank == 0 and first == jobs:
                    store.set(f"failed/{attempt}", "")  # all is known: nobody waits for an orderly end
                elif rank == 0 and store.check([f"done/{first}"]):
                    yield first, store.get(f"done/{first}").decode()
                    first, begun = first + 1, monotonic()
                elif rank == 0 and not can_begin(first):
                    begun = monotonic()
                    sleep(POLL_S)
                elif rank == 0 and monotonic() - begun > timeout_s:
                    _note(store, first, attempt, f"took more than {timeout_s:g} s")
                else:
                    sleep(POLL_S)
            if worker.poll() not in (0, None) and not store.check([f"failed/{attempt}"]):
                store.set(f"failed/{attempt}", "")
        finally:
            worker.kill()
            worker.wait(KILLED_S)
        if rank == 0:
            while first < jobs and store.check([f"done/{first}"]):
                yield first, store.get(f"done/{first}").decode()
                first += 1
            if first < jobs and not again(first):
                yield first, None
                first += 1
            store.set(f"first/{attempt}", str(first))
        first = int(store.get(f"first/{attempt}"))
        attempt += 1
    store.add("left", 1)
    end_s = monotonic() + KILLED_S
    while rank == 0 and store.add("left", 0) < int(os.environ["WORLD_SIZE"]) and monotonic() < end_s:
        sleep(POLL_S)  # the store ends with this process, and others may still read it


def working(run: Callable[[int], str], jobs: int, store: TCPStore) -> None:
    """In a worker: run the jobs from its place on; rank 0 writes down what they return."""
    place = worker_place()
    assert place is not None
    first, attempt = place
    for job in range(first, jobs):
        try:
            result = run(job)
        except Exception as error:
            traceback.print_exc()
            _note(store, job, attempt, f"rank {os.environ['RANK']}: {str(error).partition('. ')[0][:160]}")
            os._exit(1)  # messages of other ranks may be under way, for which an orderly end would wait
        if os.environ["RANK"] == "0":
            store.set(f"done/{job}", result)


def why(store: TCPStore, job: int) -> str:
    """What was noted about a job that has failed."""
    return store.get(f"why/{job}").decode() if store.check([f"why/{job}"]) else "a worker has died"


def _note(store: TCPStore, job: int, attempt: int, reason: str) -> None:
    store.compare_set(f"why/{job}", "", reason)  # the first one: other ranks fail in its wake
    store.set(f"failed/{attempt}", "")


def _started(command: Sequence[str], first: int, attempt: int) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, FIRST: str(first), ATTEMPT: str(attempt)}
    return subprocess.Popen([sys.executable, *command], env=environment)
