"""Runs DDP tests under stock DDP and under DataParallel: several at a time, each in fresh processes with a deadline."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ranks import patience

STOCK, DEFAULT, EAGER = "DDP", "DataParallel", "eager DataParallel"
MODES = (STOCK, DEFAULT, EAGER)
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

# Torch's own deadline of one test, and ours, behind it, for a test whose processes do not end. Both on an idle machine.
TORCH_DEADLINE_S = 90
DEADLINE_S = 100.0
# Most of it is read by torch's test modules as they are imported, in the process that all tests are forked from.
ENVIRONMENT = {
    "ANABRANCH_CACHE": "off",  # no test starts with the plan of another
    "BACKEND": "gloo",
    "WORLD_SIZE": "2",
    "OMP_NUM_THREADS": "1",
    "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
    "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TORCH_DEADLINE_S),
}

LEFT_OUT = {"Distributed.test_ddp_uneven_inputs": "takes more than 5 minutes under stock DDP; others test join(), too"}

CONTEXT = get_context("forkserver")


@dataclass(frozen=True)
class Result:
    """How one test ended under one wrapper."""

    outcome: str
    message: str
    duration_s: float


Results = Mapping[str, Result]  # by mode


def prepare() -> None:
    """Before anything else in this process: every test is forked from a server that has imported torch's tests."""
    os.environ.update(ENVIRONMENT)
    CONTEXT.set_forkserver_preload(["torch_suite.run_case"])


def names() -> list[str]:
    """The names of all tests but LEFT_OUT; found in another process, since torch's test modules change theirs."""
    reader, writer = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_send_names, args=(writer,))
    process.start()
    writer.close()
    found: list[str] = reader.recv()
    process.join()
    return [name for name in found if name not in LEFT_OUT]


def _send_names(writer: Any) -> None:
    from torch_suite import cases

    writer.send(cases.names())


def run_all(tests: Iterable[str], logs: Path, jobs: int, done: Callable[[str, Results], None]) -> dict[str, Results]:
    """Run each test under every wrapper; one of torch's that does not pass under stock DDP under no other."""
    with ThreadPoolExecutor(jobs) as pool:
        return dict(pool.map(lambda name: _run_modes(name, logs, done), tests))


def _run_modes(name: str, logs: Path, done: Callable[[str, Results], None]) -> tuple[str, Results]:
    results: dict[str, Result] = {}
    for mode in MODES if of_torch(name) else MODES[1:]:  # our own compare with stock DDP themselves
        results[mode] = run_one(name, mode, logs)
        if mode == STOCK and results[mode].outcome != PASSED:
            break
    done(name, results)
    return name, results


def of_torch(name: str) -> bool:
    """Whether this is a test of torch's."""
    return not name.startswith("Behaviours.")


def run_one(name: str, mode: str, logs: Path) -> Result:
    """Run one test in fresh processes; none of them is left behind."""
    start = time.monotonic()
    reader, writer = CONTEXT.Pipe(duplex=False)
    log = logs / f"{name}.{mode.replace(' ', '-')}.log"
    process = CONTEXT.Process(target=_run, args=(name, mode, str(log), writer), name=name)
    process.start()
    writer.close()
    try:
        if reader.poll(DEADLINE_S * patience()):
            outcome, message = reader.recv()
        else:
            outcome, message = FAILED, f"no result after {time.monotonic() - start:.0f} s; its output is in {log}"
    except EOFError:
        outcome, message = FAILED, f"its process died; its output is in {log}"
    finally:
        reader.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # its ranks too
        process.join()
    return Result(outcome, message, time.monotonic() - start)


def _run(name: str, mode: str, log: str, writer: Any) -> None:
    from torch_suite import run_case

    run_case.run(name, mode, log, writer)


def kinds(results: Mapping[str, Results]) -> Iterator[tuple[str, str]]:
    """For each test the line of the table that it is counted in."""
    for name, by_mode in results.items():
        stock = by_mode[STOCK].outcome if STOCK in by_mode else PASSED
        if stock == SKIPPED:
            yield name, "skipped by torch"
        elif stock == FAILED:
            yield name, "fails under stock DDP"
        elif any(result.outcome != PASSED for result in by_mode.values()):
            yield name, "passes under stock DDP only"
        else:
            yield name, "passes under both"
