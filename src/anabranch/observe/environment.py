"""The environment variables that describe the network of this process."""

import os
from collections.abc import Mapping

NETWORK_NOTE = "ANABRANCH_NETWORK_NOTE"
LAB = "ANABRANCH_LAB"


def network_note(variables: Mapping[str, str] = os.environ) -> str | None:
    """The sentence in ``ANABRANCH_NETWORK_NOTE``; None where the variable is unset or empty.

    A launcher that emulates a network sets it, such as ``anabranch lab --emulate``. Every measurement and report of
    the process then contains the sentence, so that an emulated network is not taken for a real one.
    """
    return variables.get(NETWORK_NOTE) or None


def lab_note(variables: Mapping[str, str] = os.environ) -> str | None:
    """The hosts and links of the lab that runs this process, as ``anabranch lab`` describes them; None outside it."""
    return variables.get(LAB) or None
