"""Switches without code: ``ANABRANCH=off`` and ``ANABRANCH_TRACE=steps.json``. Rank 0's environment counts."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from anabranch.exchange.agree import from_rank_0
from anabranch.exchange.contracts import Group
from anabranch.values.errors import FileError
from anabranch.values.files import save
from anabranch.values.timeline import Timeline

log = logging.getLogger("anabranch")

SWITCH, TRACE = "ANABRANCH", "ANABRANCH_TRACE"
OFF, ON = "off", ("", "on")
TOO_SHORT = "training ended before a step was timed"
TURNED_OFF = "ANABRANCH=off turns it off"


def is_off(group: Group, variables: Mapping[str, str] = os.environ) -> bool:
    """Whether ``ANABRANCH`` is off on rank 0. Collective.

    Raises ValueError on all ranks if it is neither off nor on.
    """
    value = from_rank_0(variables.get(SWITCH, "").strip().lower().encode(), group).decode()
    if value != OFF and value not in ON:
        raise ValueError(f"the environment variable {SWITCH} is {value!r} on rank 0: expected off, or on")
    return value == OFF


def timeline_path(rank: int, variables: Mapping[str, str] = os.environ) -> Path | None:
    """Where this rank writes its measured timeline: rank 0 to ``ANABRANCH_TRACE``, the others nowhere."""
    given = variables.get(TRACE, "")
    return Path(given) if given and rank == 0 else None


def write_timeline(timeline: Timeline | None, path: Path | None, missing: str = TOO_SHORT) -> None:
    """Write it, in place of an older one; what goes wrong is a warning, since other ranks train on.

    ``missing``: why there is no timeline, if there is none.
    """
    if path is None:
        return
    try:
        if timeline is None:
            raise FileError(missing)
        save(timeline, path, force=True)
    except (FileError, OSError) as error:
        log.warning("anabranch: %s=%s was not written: %s", TRACE, path, error)
