"""A training step by step, from JSON lines: of ``ab.JsonLines``, of losses, or of both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anabranch.errors import FileError
from anabranch.files import brief, parse_json
from anabranch.report.runs.documents import StepLine


@dataclass(frozen=True, slots=True)
class Training:
    """Lines in the order of rising steps, all of one start of one rank."""

    name: str
    lines: tuple[StepLine, ...]
    notes: tuple[str, ...] = ()


def trainings(text: bytes, where: str, name: str) -> list[Training]:
    """Each start that a file of JSON lines tells of, by the file's ``name``; FileError if a line is not understood.

    A last line without its end is left out: its program is still writing, or died while it did.
    """
    rows = text.split(b"\n")
    notes: list[str] = []
    if rows and rows[-1].strip() and not _is_json(rows[-1]):
        notes.append(f"the last line of {name} is not complete and was left out")
        rows.pop()
    lines = [_line(row, f"{where}, line {at}") for at, row in enumerate(rows, start=1) if row.strip()]
    if not lines:
        raise FileError(f"{where}: holds no complete step; expected lines of ab.JsonLines, such as a run leaves behind")
    found: list[Training] = []
    # A GPU's metrics come some steps late, so that losses in the same file are ahead of them.
    streams: tuple[Callable[[StepLine], bool], ...] = (
        lambda line: line.measured_s is not None,
        lambda line: line.measured_s is None,
    )
    for stream in streams:
        for rank in sorted({line.rank for line in lines}):
            own = [line for line in lines if line.rank == rank and stream(line)]
            found += _starts(own, f"{name}, rank {rank}" if rank else name, tuple(notes))
    return found


def _is_json(row: bytes) -> bool:
    try:
        parse_json(row, "")
    except FileError:
        return False
    return True


def _line(row: bytes, where: str) -> StepLine:
    from pydantic import ValidationError

    try:
        line = StepLine.model_validate(parse_json(row, where))
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        at = ".".join(str(part) for part in found["loc"]) or "line"
        raise FileError(f"{where}: {at}: {found['msg']}, found {brief(found['input'])}") from error
    if line.measured_s is None and line.loss is None:
        raise FileError(f"{where}: has neither measured_s nor loss: expected a line of ab.JsonLines, or step and loss")
    return line


def _starts(lines: Sequence[StepLine], name: str, notes: tuple[str, ...]) -> list[Training]:
    """Cut where the count of steps begins again: a logger appends to what a former start has written."""
    parts: list[list[StepLine]] = []
    for line in lines:
        if not parts or line.step <= parts[-1][-1].step:
            parts.append([])
        parts[-1].append(line)
    names = [name] if len(parts) == 1 else [f"{name}, start {number}" for number in range(1, len(parts) + 1)]
    return [Training(own, tuple(part), notes) for own, part in zip(names, parts, strict=True)]
