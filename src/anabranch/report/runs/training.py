"""A training step by step, from JSON lines: of ``ab.JsonLines``, of losses, or of both."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anabranch.errors import FileError
from anabranch.files import complaint, parse_json
from anabranch.report.runs.documents import MOST_DRAWN, StepLine

MAX_LINES = 500_000  # about a gigabyte of memory and a quarter of a minute


@dataclass(frozen=True, slots=True)
class Training:
    """Lines in the order of rising steps, all of one start of one rank."""

    name: str
    lines: tuple[StepLine, ...]
    notes: tuple[str, ...] = ()


def trainings(text: bytes, where: str, name: str) -> list[Training]:
    """Each start that a file of JSON lines tells of, by the file's ``name``; FileError if a line is not understood.

    A last line without its end is left out: its program is still writing, or died while it did. So is a line that was
    torn by such a death, before the next start went on with the file; and a loss that is not a number. Notes say so.
    """
    if (many := text.count(b"\n")) > MAX_LINES:
        raise FileError(
            f"{where}: has {many:,} lines: expected {MAX_LINES:,} at most; give the last of them, or every tenth"
        )
    rows = [(at, row) for at, row in enumerate(text.split(b"\n"), start=1) if row.strip(b" \t\r\0")]
    lines, lost, torn = [], [], []
    for at, row in rows:
        place = f"{where}, line {at}"
        try:
            value = parse_json(row.strip(b"\0"), place, nan_as_none=True)
        except FileError:
            if not _is_torn(row):
                raise
            torn.append(at)
            continue
        line, is_lost = _line(value, place)
        lost += [line.step] * is_lost
        lines += [line] * _tells(line)
    notes = _notes(name, torn, rows[-1][0] if not text.endswith(b"\n") else 0, lost)
    if len(torn) > 1 + len(lines) + len(lost):
        raise FileError(f"{where}: {_some('line', torn)} not complete; expected lines of ab.JsonLines, one object each")
    return _apart(lines, where, name, notes, bool(lost))


def _notes(name: str, torn: Sequence[int], unended: int, lost: Sequence[int]) -> tuple[str, ...]:
    """What was left out; ``unended`` is the number of a last line that has no end."""
    notes = []
    if unended in torn:
        notes.append(f"the last line of {name} is not complete and was left out")
    if inner := [at for at in torn if at != unended]:
        notes.append(f"in {name}, {_some('line', inner)} not complete, as after a crash, and left out")
    if lost:
        notes.append(f"{_some('step', lost)} without a loss that can be drawn: it is not a number")
    return tuple(notes)


def _apart(lines: Sequence[StepLine], where: str, name: str, notes: tuple[str, ...], lost: bool) -> list[Training]:
    """Metrics and losses by themselves, each rank by itself."""
    if not lines:
        raise FileError(
            f"{where}: has no step whose loss is a number, so there is nothing to draw"
            if lost
            else f"{where}: holds no complete step; expected lines of ab.JsonLines, such as a run leaves behind"
        )
    # A GPU's metrics come some steps late, so that losses in the same file are ahead of them.
    own: dict[tuple[bool, int], list[StepLine]] = {}
    for line in lines:
        own.setdefault((line.measured_s is None, line.rank), []).append(line)
    found: list[Training] = []
    for (_, rank), told in sorted(own.items(), key=lambda item: item[0]):
        found += _starts(told, f"{name}, rank {rank}" if rank else name, notes)
    return found


def _is_torn(row: bytes) -> bool:
    """Whether a line begins as one of ours and breaks off, or goes on with another one."""
    if not row.lstrip(b" \t\0").startswith(b"{"):
        return False
    try:
        json.loads(row)
    except json.JSONDecodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


def _some(thing: str, numbers: Sequence[int]) -> str:
    """Line 7 is; lines 7, 9, … (12 in all) are."""
    if len(numbers) == 1:
        return f"{thing} {numbers[0]:,} is"
    more = f" … ({len(numbers):,} in all)" if len(numbers) > 3 else ""
    return f"{thing}s {', '.join(f'{number:,}' for number in numbers[:3])}{more} are"


def _line(value: Any, where: str) -> tuple[StepLine, bool]:
    """The line, and whether it had a loss that cannot be drawn."""
    from pydantic import ValidationError

    lost = False
    if isinstance(value, dict) and "loss" in value:
        loss = value["loss"]
        lost = loss is None or (isinstance(loss, float) and not abs(loss) <= MOST_DRAWN)
        value["loss"] = None if lost else loss
    try:
        line = StepLine.model_validate(value)
    except ValidationError as error:
        wrong = complaint(error.errors(include_url=False)[:1], "line")
        raise FileError(
            f"{where}: {wrong}; expected a line of ab.JsonLines, or step and loss: take this line out"
        ) from error
    if not lost and not _tells(line):
        raise FileError(f"{where}: has neither measured_s nor loss: expected a line of ab.JsonLines, or step and loss")
    return line, lost


def _tells(line: StepLine) -> bool:
    return line.measured_s is not None or line.loss is not None


def _starts(lines: Sequence[StepLine], name: str, notes: tuple[str, ...]) -> list[Training]:
    """Cut where the count of steps begins again: a logger appends to what a former start has written."""
    parts: list[list[StepLine]] = []
    for line in lines:
        if not parts or line.step <= parts[-1][-1].step:
            parts.append([])
        parts[-1].append(line)
    names = [name] if len(parts) == 1 else [f"{name}, start {number}" for number in range(1, len(parts) + 1)]
    return [Training(own, tuple(part), notes) for own, part in zip(names, parts, strict=True)]
