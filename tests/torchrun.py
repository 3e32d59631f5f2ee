"""Programs under torchrun, as users start them, and ranks that are killed on the way."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from ranks import patience

DEADLINE_S = 150  # frameworks take half a minute to be imported where cores are busy

# Runs a program, and kills its own rank on the way into the n-th backward, unless torchrun has restarted it; one that
# ends says how many there were: python killer.py RANK N PROGRAM ...
KILLER = """
import os, runpy, signal, sys
import torch

victim, fatal, *sys.argv = sys.argv[1:]
backward, calls = torch.Tensor.backward, 0

def mortal(*args, **kwargs):
    global calls
    calls += 1
    if os.environ["RANK"] == victim and calls == int(fatal) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    backward(*args, **kwargs)

torch.Tensor.backward = mortal
runpy.run_path(sys.argv[0], run_name="__main__")
print(f"{calls} times backward")
"""


def torchrun(ranks: int, *program: str | Path, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """Both streams and the exit code of a program under torchrun; in the end none of its processes is left.

    Ranks have a store of their own: in the one that they share with torchrun, restarted ranks find addresses of the
    ranks before them, and cannot connect (pytorch #135712).
    """
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    launch += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    process = subprocess.Popen(
        [sys.executable, *launch, *map(str, program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=DEADLINE_S * patience())
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its ranks, which have sessions of their own
        try:
            process.communicate(timeout=45)  # else Python warns, in another test, of a process that nobody waited for
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def aborted_at_its_end(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether a program that was through failed: Gloo's threads may outlive Python and abort it.

    Under plain DDP, too (3 of 12 runs here, docs/log.md). Such a run is done again.
    """
    return done.returncode != 0 and "terminate called without an active exception" in done.stderr


def marked(mark: str) -> list[int]:
    """The processes that were started with this entry, such as "MARK=x", in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
