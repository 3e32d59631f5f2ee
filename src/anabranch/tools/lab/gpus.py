"""GPUs of this machine, and NVIDIA's MPS daemon, which lets several ranks compute on one GPU at the same time.

A private daemon is started in a folder of its own; no setting of the GPU is changed. The janitor ends it.
"""

import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

from anabranch.tools.lab.janitor import MPS_CONTROL, MPS_PIPES, mps_error
from anabranch.values.errors import LabError

SMI_TIMEOUT_S = 30.0  # nvidia-smi may have to wake the driver
_LISTED = re.compile(r"^GPU (\d+):.*\(UUID: (GPU-[0-9a-fA-F-]+)\)", re.MULTILINE)

MPS_LOGS = "CUDA_MPS_LOG_DIRECTORY"
MPS_QUERY = "get_server_list\n"  # any command would do: only the fact of an answer counts
MPS_START_S = 30.0
PAUSE_S = 0.1
LOG_LINES = 5


def available_gpus() -> list[str]:
    """The GPUs that this process may use, as unique ids where nvidia-smi lists them, else as the user names them.

    Unique ids, because numbers change their meaning behind an MPS daemon that sees only some of the GPUs.
    """
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
        listed: dict[str, str] = dict(_LISTED.findall(done.stdout))
    except (OSError, subprocess.TimeoutExpired):
        listed = {}
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = listed if allowed is None else [name.strip() for name in allowed.split(",")]
    return [listed.get(name, name) for name in names if name not in ("", "-1")]


def user_mps_answers() -> bool:
    """Whether the user's own MPS daemon, at CUDA_MPS_PIPE_DIRECTORY, runs and can be used."""
    return MPS_PIPES in os.environ and mps_error(os.environ.copy(), text=MPS_QUERY) is None


def new_mps_folder() -> str:
    """Create a folder for the pipes and logs of an MPS daemon."""
    folder = tempfile.mkdtemp(prefix="anabranch-mps-")
    for part in ("pipe", "log"):
        Path(folder, part).mkdir()
    return folder


def start_mps(folder: str) -> dict[str, str]:
    """Start an MPS daemon and wait until it answers; returns the environment variables by which ranks find it.

    LabError with the daemon's own message if it does not start.
    """
    logs = Path(folder, "log")
    variables = {MPS_PIPES: f"{folder}/pipe", MPS_LOGS: str(logs)}
    environment = {**os.environ, **variables}
    deadline = time.monotonic() + MPS_START_S
    error = mps_error(environment, "-d")
    if error is None:
        while (error := mps_error(environment, text=MPS_QUERY)) is not None and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
    if error is not None:
        log = logs / "control.log"
        logged = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else ["empty"]
        raise LabError(
            f"{MPS_CONTROL} -d did not start: {error}; its log: {' / '.join(logged)}. "
            "Without MPS the hosts would take turns on the GPU, and measured times would mean nothing"
        )
    return variables
