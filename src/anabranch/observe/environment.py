"""What a measurement says of its circumstances: the machine, and environment variables that describe the network."""

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime

import torch

from anabranch.values.checks import Scalar

NETWORK_NOTE = "ANABRANCH_NETWORK_NOTE"
LAB = "ANABRANCH_LAB"


def network_note(variables: Mapping[str, str] = os.environ) -> str | None:
    """The sentence in ``ANABRANCH_NETWORK_NOTE``; None where the variable is unset or empty.

    A launcher that emulates a network sets it, such as ``anabranch lab --emulate``. Every measurement and report of
    the process then contains the sentence, so that an emulated network is not taken for a real one.
    """
    return variables.get(NETWORK_NOTE) or None


def lab_note() -> str | None:
    """The hosts and links of the lab that runs this process, as ``anabranch lab`` describes them; None outside it."""
    return os.environ.get(LAB) or None


def machine_facts(device: torch.device) -> dict[str, Scalar]:
    """Date, versions and hardware of a measurement."""
    facts: dict[str, Scalar] = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"CPU {platform.machine()}, {torch.get_num_threads()} threads",
    }
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
        facts["matmul_tf32"] = torch.backends.cuda.matmul.allow_tf32
        facts["cudnn_tf32"] = torch.backends.cudnn.allow_tf32
    return facts
