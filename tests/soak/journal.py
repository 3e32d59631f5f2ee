"""Journal: what a rank does, as lines of JSON in a file that outlives the rank."""

import json
import os
import time
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Journal:
    """Appends events to a file; each is one write, so a kill leaves whole lines."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def note(self, what: str, **facts: Any) -> None:
        """Write one event with the time of now."""
        os.write(self._file, json.dumps({"what": what, "at": time.monotonic(), **facts}).encode() + b"\n")


def read(path: Path) -> list[Event]:
    """The events in a journal; none if there is no journal. A line that is still being written is left out."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line]
