"""The lab's last words: which rank failed first, what it said, and how the others ended."""

import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from anabranch.lab.rank_process import RankProcess
from anabranch.lab.supervisor import Ending


def tell(ending: Ending, members: Sequence[RankProcess], timeout_s: float | None) -> None:
    """On stderr, and nothing after success."""
    lines: list[str] = []
    if ending.stopped_by is not None:
        lines += [f"anabranch lab: stopped by {signal.Signals(ending.stopped_by).name}: {fates(members)}"]
    elif ending.first is not None:
        lines += _failure(ending.first, "failed first")
        for member in members:
            # With torchrun inside, a host ends seconds after its rank: the first to end need not be the first to fail.
            if member.several and member is not ending.first and member.code:
                lines += _failure(member, "failed, too")
        if others := [member for member in members if member is not ending.first]:
            lines += [f"anabranch lab: after it: {fates(others)}"]
    elif ending.timed_out:
        lines += [f"anabranch lab: not done after {timeout_s:g} s: {fates(members)}"]
    with suppress(BrokenPipeError):  # whoever read our words has gone; the exit code still counts
        for line in lines:
            print(line, file=sys.stderr)


def fates(members: Sequence[RankProcess]) -> str:
    """How they ended, those alike together: "rank 0, rank 1: exit code 1; rank 3: killed by SIGABRT"."""
    alike: dict[str, list[str]] = {}
    for member in members:
        alike.setdefault(member.fate, []).append(member.name)
    return "; ".join(f"{', '.join(names)}: {fate}" for fate, names in alike.items())


def _failure(first: RankProcess, how: str) -> list[str]:
    lines = first.last_lines()
    if first.words is None:
        words = "its own words are above"
    elif lines:
        words = "its last words:"
    else:
        words = "it said nothing"
    return [
        f"anabranch lab: {first.name} {how} ({first.fate}); {words}",
        *(f"{first.name} | {line}" for line in lines),
    ]
