"""NVIDIA's MPS daemon, which lets the ranks compute on one GPU at the same time instead of in turns.

A private one is started in a folder of its own; no setting of the GPU is touched. The janitor ends it.
"""

import os
import subprocess
import tempfile
import time
from pathlib import Path

from anabranch.errors import LabError
from anabranch.lab.janitor import MPS_CONTROL, MPS_PIPES, mps_entry

MPS_LOGS = "CUDA_MPS_LOG_DIRECTORY"
QUESTION = "get_server_list\n"  # any would do: what counts is that somebody answers
START_S = 30.0
ANSWER_S = 10.0
PAUSE_S = 0.1
LOG_LINES = 5


def running() -> bool:
    """Whether the user's own daemon, the one that CUDA_MPS_PIPE_DIRECTORY leads to, is there to be used."""
    return MPS_PIPES in os.environ and _trouble(os.environ.copy(), text=QUESTION) is None


def folder() -> str:
    """A new folder for the daemon's pipes and logs."""
    made = tempfile.mkdtemp(prefix="anabranch-mps-")
    for part in ("pipe", "log"):
        Path(made, part).mkdir()
    return made


def start(folder: str) -> dict[str, str]:
    """Start the daemon and wait until it answers; the variables that lead the ranks to it.

    LabError with the daemon's own words if it does not come up.
    """
    name, _, pipes = mps_entry(folder).partition("=")
    leads = {name: pipes, MPS_LOGS: str(Path(folder, "log"))}
    environment = {**os.environ, **leads}
    deadline = time.monotonic() + START_S
    trouble = _trouble(environment, "-d")
    if trouble is None:
        while (trouble := _trouble(environment, text=QUESTION)) is not None and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
    if trouble is not None:
        log = Path(folder, "log", "control.log")
        logged = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
        raise LabError(
            f"{MPS_CONTROL} -d did not come up: {trouble}; its log: {' / '.join(logged) or 'empty'}. "
            "Without MPS the hosts would take turns on the GPU, and no time measured would mean anything"
        )
    return leads


def _trouble(environment: dict[str, str], *options: str, text: str = "") -> str | None:
    """None if the control program could do this, else what it or the system says instead."""
    # Into a file, not a pipe: the daemon keeps what it was started with, and a pipe would have no end.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            done = subprocess.run(
                [MPS_CONTROL, *options],
                input=text,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=ANSWER_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        output.seek(0)
        words = " ".join(output.read().split())
    failed = done.returncode != 0 or words.lower().startswith("cannot find mps")
    return f"exit code {done.returncode}: {words or 'no words'}" if failed else None
