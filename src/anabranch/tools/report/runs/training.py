"""Trainings from files of JSON lines: metrics of ``ab.JsonLines``, losses, or both."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from anabranch.tools.report.documents import MAX_NUMBER, Count, Instant, Number
from anabranch.values.errors import FileError
from anabranch.values.files import complaint, parse_json

MAX_LINES = 500_000  # which take about 1 GB of memory and 15 s


class StepLine(BaseModel):
    """A line of ``ab.JsonLines``, or of a file of losses; at least one of ``measured_s`` and ``loss`` is there."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)

    step: Count
    rank: Count = 0
    loss: Number | None = None
    measured_s: Instant | None = None
    predicted_s: Instant | None = None
    compute_s: Instant | None = None
    exposed_s: Instant | None = None
    overlap: Number | None = None
    sent_nbytes: Count | None = None
    density: Number | None = None
    plan: str | None = None
    buckets: Count | None = None
    lanes: Count | None = None
    stage: str = ""


@dataclass(frozen=True, slots=True)
class Training:
    """The lines of one rank from one start of the program to its end, by rising step."""

    name: str
    lines: tuple[StepLine, ...]
    notes: tuple[str, ...] = ()


def trainings(text: bytes, where: str, name: str) -> list[Training]:
    """The trainings in a file of JSON lines, one per start of the program and rank; FileError for an unknown line.

    Left out, with a note, are: a last line without its end (the program still writes it, or died meanwhile), a line
    that such a death cut off before the next start appended to the file, and a loss that is not a number.
    """
    if (many := text.count(b"\n")) > MAX_LINES:
        raise FileError(
            f"{where}: has {many:,} lines: expected {MAX_LINES:,} at most; give the last of them, or every tenth"
        )
    rows = [(at, row) for at, row in enumerate(text.split(b"\n"), start=1) if row.strip(b" \t\r\0")]
    lines: list[StepLine] = []
    without_loss: list[int] = []
    truncated: list[int] = []
    for at, row in rows:
        place = f"{where}, line {at}"
        try:
            value = parse_json(row.strip(b"\0"), place, nan_as_none=True)
        except FileError:
            if not _is_truncated(row):
                raise
            truncated.append(at)
            continue
        line, loss_is_missing = _line(value, place)
        if loss_is_missing:
            without_loss.append(line.step)
        if _has_data(line):
            lines.append(line)
    notes = _notes(name, truncated, rows[-1][0] if not text.endswith(b"\n") else 0, without_loss)
    if len(truncated) > 1 + len(lines) + len(without_loss):
        raise FileError(
            f"{where}: {_numbers_are('line', truncated)} not complete; expected lines of ab.JsonLines, one object each"
        )
    return _by_rank(lines, where, name, notes, bool(without_loss))


def _notes(name: str, truncated: Sequence[int], unended: int, without_loss: Sequence[int]) -> tuple[str, ...]:
    """What was left out; ``unended`` is the number of a last line that has no end."""
    notes = []
    if unended in truncated:
        notes.append(f"the last line of {name} is not complete and was left out")
    if inner := [at for at in truncated if at != unended]:
        notes.append(f"in {name}, {_numbers_are('line', inner)} not complete, as after a crash, and left out")
    if without_loss:
        notes.append(f"{_numbers_are('step', without_loss)} without a loss that can be drawn: it is not a number")
    return tuple(notes)


def _by_rank(
    lines: Sequence[StepLine], where: str, name: str, notes: tuple[str, ...], without_loss: bool
) -> list[Training]:
    """Metrics and losses separately, each rank separately."""
    if not lines:
        raise FileError(
            f"{where}: has no step whose loss is a number, so there is nothing to draw"
            if without_loss
            else f"{where}: holds no complete step; expected lines of ab.JsonLines, such as a run leaves behind"
        )
    # A GPU's metrics come some steps late, so that losses in the same file are ahead of them.
    own: dict[tuple[bool, int], list[StepLine]] = {}
    for line in lines:
        own.setdefault((line.measured_s is None, line.rank), []).append(line)
    found: list[Training] = []
    for (_, rank), own_lines in sorted(own.items(), key=lambda item: item[0]):
        found += _starts(own_lines, f"{name}, rank {rank}" if rank else name, notes)
    return found


def _is_truncated(row: bytes) -> bool:
    """Whether a line begins as a JSON object and is cut off, or runs into the next one."""
    if not row.lstrip(b" \t\0").startswith(b"{"):
        return False
    try:
        json.loads(row)
    except json.JSONDecodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


def _numbers_are(thing: str, numbers: Sequence[int]) -> str:
    """Line 7 is; lines 7, 9, … (12 in all) are."""
    if len(numbers) == 1:
        return f"{thing} {numbers[0]:,} is"
    more = f" … ({len(numbers):,} in all)" if len(numbers) > 3 else ""
    return f"{thing}s {', '.join(f'{number:,}' for number in numbers[:3])}{more} are"


def _line(value: Any, where: str) -> tuple[StepLine, bool]:
    """The line, and whether it had a loss that cannot be drawn."""
    without_loss = False
    if isinstance(value, dict) and "loss" in value:
        loss = value["loss"]
        without_loss = loss is None or (isinstance(loss, float) and not abs(loss) <= MAX_NUMBER)
        value["loss"] = None if without_loss else loss
    try:
        line = StepLine.model_validate(value)
    except ValidationError as error:
        wrong = complaint(error.errors(include_url=False)[:1], "line")
        raise FileError(
            f"{where}: {wrong}; expected a line of ab.JsonLines, or step and loss: take this line out"
        ) from error
    if not without_loss and not _has_data(line):
        raise FileError(f"{where}: has neither measured_s nor loss: expected a line of ab.JsonLines, or step and loss")
    return line, without_loss


def _has_data(line: StepLine) -> bool:
    return line.measured_s is not None or line.loss is not None


def _starts(lines: Sequence[StepLine], name: str, notes: tuple[str, ...]) -> list[Training]:
    """One training per start: the file is cut where the step number falls, since a logger appends to an old file."""
    parts: list[list[StepLine]] = []
    for line in lines:
        if not parts or line.step <= parts[-1][-1].step:
            parts.append([])
        parts[-1].append(line)
    names = [name] if len(parts) == 1 else [f"{name}, start {number}" for number in range(1, len(parts) + 1)]
    return [Training(own, tuple(part), notes) for own, part in zip(names, parts, strict=True)]
