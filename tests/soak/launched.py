"""Ranks that a launcher has started, which receives the signal: it and all of them must end soon."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ranks import patience
from soak.case import Case
from soak.faults import TIMEOUT_S
from soak.journal import Event, read
from soak.judge import BY_THREADS, Verdict, nameless
from soak.world import SIGNAL_S
from torchrun import marked

START_S = 60.0  # from the launcher's start until all ranks have come to the step of the signal
POLL_S = 0.05
MARK = "ANABRANCH_SOAK_MARK"  # a variable of the environment of all that the launcher starts
KILLED = "forcefully exiting"  # what torchrun says of ranks that had to be killed
ENDED = ("KeyboardInterrupt", "SystemExit")  # what a rank's handler of the signal raises
NUMBERS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM}


def run_launched(case: Case, folder: Path) -> Verdict:
    """Have the case's launcher start its ranks, send it the signal in the case's step, and watch all of them end."""
    folder.mkdir(parents=True, exist_ok=True)
    mark, words, number = f"{MARK}={folder}", folder / "stderr", NUMBERS[case.kind.action]
    variables = {
        "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
        "OMP_NUM_THREADS": "1",
        MARK: str(folder),
    }
    with words.open("wb") as out:
        launcher = subprocess.Popen(
            command(case, folder),
            stdout=out,
            stderr=out,
            env={**os.environ, **variables, "PYTHONWARNINGS": "ignore"},
            start_new_session=True,
        )
    try:
        ready = _wait(lambda: launcher.poll() is None, lambda: _all_at(case, folder), START_S * patience())
        began = time.monotonic()
        if ready:
            launcher.send_signal(number)
            _wait(lambda: True, lambda: launcher.poll() is not None and not marked(mark), SIGNAL_S * patience())
        took_s, left = time.monotonic() - began, marked(mark)
    finally:
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()
    journals = [read(folder / f"rank-{rank}.jsonl") for rank in range(case.ranks)]
    said = words.read_text(errors="replace")
    if not ready:
        return Verdict("crash", f"the ranks did not come to step {case.moment}: {said.strip()[-300:]}")
    return replace(verdict_of(case, journals, launcher.returncode, left, said), stage="launched", end_s=took_s)


def command(case: Case, folder: Path) -> list[str]:
    """What is started; under ``anabranch run`` the ranks' program is one for DDP."""
    if case.kind.launcher == "anabranch run":
        launcher = ["-m", "anabranch", "run", "--nproc-per-node", str(case.ranks), "-m"]
    else:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks), "-m"]
    return [sys.executable, *launcher, "soak.launched", str(case), str(folder)]


def verdict_of(
    case: Case, journals: Sequence[Sequence[Event]], code: int | None, left: Sequence[int], said: str
) -> Verdict:
    """The outcome, from the ranks' journals, the launcher's exit code, who was still alive, and what was printed."""
    if left or KILLED in said:
        who = f"{len(left)} processes" if left else "ranks that the launcher killed"
        return Verdict("hang", f"{who} had not ended {SIGNAL_S:g} s after the signal to the launcher")
    if code == 0:
        return Verdict("crash", "the launcher ended with 0, as if all had been trained")
    if sign := next((sign for sign in BY_THREADS if sign in said), ""):
        line = next(line for line in said.splitlines() if sign in line)
        return Verdict("unnamed traceback", f"printed {line[:160]!r}")
    ends = [event for events in journals for event in events if event["what"] == "error"]
    if not any(end["kind"] in ENDED for end in ends):
        return Verdict("hang", "no rank has received the signal")
    words = tuple(f"{end['kind']}: {end['words']}" for end in ends)
    problems = [problem for end in ends if end["kind"] not in ENDED and (problem := nameless(end))]
    return Verdict("unnamed traceback" if problems else "clear error", "; a rank ".join(problems), words=words)


def _all_at(case: Case, folder: Path) -> bool:
    """Whether all ranks have made the step of the signal."""
    steps = [
        max((event["step"] for event in read(folder / f"rank-{rank}.jsonl") if event["what"] == "step"), default=-1)
        for rank in range(case.ranks)
    ]
    return min(steps) >= int(case.moment)


def _wait(may_go_on: Callable[[], bool], done: Callable[[], bool], at_most_s: float) -> bool:
    """Wait for ``done``; whether it came in time, and before ``may_go_on`` ended."""
    end = time.monotonic() + at_most_s
    while time.monotonic() < end and may_go_on():
        if done():
            return True
        time.sleep(POLL_S)
    return False


if __name__ == "__main__":
    from soak.rank import Order, run

    text, where = sys.argv[1:]
    its = Case.parse(text)
    run(Order(text, int(os.environ["RANK"]), where, TIMEOUT_S * patience(), control=its.kind.launcher != "torchrun"))
