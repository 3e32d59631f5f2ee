"""GPUs of this machine, by the names that CUDA_VISIBLE_DEVICES takes."""

import os
import re
import shutil
import subprocess
from pathlib import Path

ANSWER_S = 30.0  # nvidia-smi may have to wake the driver
_LISTED = re.compile(r"^GPU (\d+):.*\(UUID: (GPU-[0-9a-fA-F-]+)\)", re.MULTILINE)


def gpus() -> list[str]:
    """The GPUs that this process may use, as unique ids where nvidia-smi tells them, else as numbers.

    Unique ids, because the numbers change their meaning behind an MPS daemon that sees a part of the GPUs.
    """
    listed = _by_nvidia_smi() or {str(number): str(number) for number in _devices()}
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return list(listed.values())
    return [listed.get(name.strip(), name.strip()) for name in allowed.split(",") if name.strip() not in ("", "-1")]


def _by_nvidia_smi() -> dict[str, str]:
    """Unique id by number."""
    if shutil.which("nvidia-smi") is None:
        return {}
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return {}
    return dict(_LISTED.findall(done.stdout))


def _devices() -> list[int]:
    return sorted(int(path.name[6:]) for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit())
