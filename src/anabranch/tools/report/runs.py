"""Reads the files and folders of a run. The content of a file says what it is; its name does not matter."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from anabranch.tools.predict.scaling.result import Scaling
from anabranch.tools.report import documents
from anabranch.tools.report.documents import BY_COMMAND, Document
from anabranch.tools.report.tables import Cell, Table
from anabranch.tools.report.training import Training, trainings
from anabranch.tools.report.window import RankStep, rank_steps
from anabranch.values.errors import FileError
from anabranch.values.files import KINDS, brief, complaint, loads, parse_json, read_bytes
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.sharded import ShardedTrace, ShardingPlan
from anabranch.values.timeline import Timeline
from anabranch.values.trace import Trace

EXPECTED = (
    "a trace, network, plan or timeline, what --json of "
    f"{', '.join(BY_COMMAND)} prints, lines of ab.JsonLines, or a trace of model.trace_steps"
)
SUFFIXES = (".json", ".jsonl")
FIRST_FIELD = b'{"step"'  # how a line of ab.JsonLines begins, also one that is cut off
MAX_FILES = 200  # of a folder

Content = Trace | Network | Plan | Timeline | Document | list[RankStep] | list[Training]

# Where the content of a file is kept, and how the page calls it.
PLACES: Mapping[type[Any], tuple[str, str]] = {
    Trace: ("traces", "trace"),
    Network: ("networks", "network"),
    Plan: ("plans", "plan"),
    Timeline: ("timelines", "timeline"),
    documents.PlanDocument: ("steps", "predicted step"),
    documents.SimulateDocument: ("steps", "predicted step"),
    documents.CompareDocument: ("comparisons", "comparison of planners"),
    Scaling: ("scalings", "scaling"),
    documents.MemoryDocument: ("memories", "memory"),
    documents.BenchDocument: ("benches", "benchmark"),
    documents.DemoDocument: ("demos", "demo"),
}


@dataclass(slots=True)
class Runs:
    """The content of all files by kind, each with the name of its file; and which files were skipped, and why."""

    files: list[tuple[str, str]] = field(default_factory=list)  # name, kind
    skipped: list[str] = field(default_factory=list)
    traces: list[tuple[str, Trace]] = field(default_factory=list)
    networks: list[tuple[str, Network]] = field(default_factory=list)
    plans: list[tuple[str, Plan]] = field(default_factory=list)
    timelines: list[tuple[str, Timeline]] = field(default_factory=list)
    windows: list[tuple[str, list[RankStep]]] = field(default_factory=list)
    steps: list[tuple[str, documents.PlanDocument | documents.SimulateDocument]] = field(default_factory=list)
    comparisons: list[tuple[str, documents.CompareDocument]] = field(default_factory=list)
    scalings: list[tuple[str, Scaling]] = field(default_factory=list)
    memories: list[tuple[str, documents.MemoryDocument]] = field(default_factory=list)
    benches: list[tuple[str, documents.BenchDocument]] = field(default_factory=list)
    demos: list[tuple[str, documents.DemoDocument]] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)

    def add(self, name: str, content: Content) -> None:
        """Append the content of file ``name`` to the list of its kind."""
        if not isinstance(content, list):
            place, kind = PLACES[type(content)]
            getattr(self, place).append((name, content))
        elif ranks := [item for item in content if isinstance(item, RankStep)]:
            self.windows.append((name, ranks))
            kind = f"step {ranks[0].step} of {len(ranks)} ranks"
        else:
            found = [item for item in content if isinstance(item, Training)]
            self.trainings += found
            kind = f"{sum(len(training.lines) for training in found):,} lines of a training"
        self.files.append((name, kind))


def file_table(runs: Runs) -> Table:
    """Every file and what it is; what was skipped, and why."""
    rows = [[Cell(name), Cell(kind)] for name, kind in runs.files]
    return Table("Files read", ["file", "content"], rows, "".join(f"Skipped: {reason}. " for reason in runs.skipped))


def read_runs(paths: Iterable[Path]) -> Runs:
    """The content of these files, and of the files in these folders; FileError for a broken or unknown file.

    A folder may also hold unknown files: they are skipped, and named in ``skipped``.
    """
    runs = Runs()
    for path in paths:
        if not os.path.isdir(path):  # noqa: PTH112 (unlike Path.is_dir, answers for a name too long to be one)
            runs.add(path.name, parse_file(read_bytes(path), str(path)))
            continue
        before = len(runs.files)
        for inner in _files_in(path):
            try:
                runs.add(inner.name, parse_file(read_bytes(inner), str(inner)))
            except _UnknownError as error:
                runs.skipped.append(str(error))
        if len(runs.files) == before:
            raise FileError(f"{path}: a folder without a file that is known; expected {EXPECTED}, ending in .json[l]")
    return runs


def parse_file(text: bytes, where: str) -> Content:
    """The content of a file, whatever its name; FileError if it is broken or not one of ours."""
    if not text.strip():
        raise FileError(f"{where}: is empty; the command that was to write it may have failed: run it again")
    if _is_step_line(text.lstrip()[: 1 << 20].split(b"\n", 1)[0]):
        return trainings(text, where, Path(where).name)
    try:
        document = parse_json(text, where)
    except FileError as error:
        raise FileError(f"{error}; expected {EXPECTED}") from error
    if not isinstance(document, dict):
        raise _UnknownError(f"{where}: holds a JSON {type(document).__name__}; expected {EXPECTED}")
    if "format" in document:
        noun = loads(text, where) if document["format"] in list(KINDS) else None
        if noun is None or isinstance(noun, ShardedTrace | ShardingPlan):  # there is no page of these
            raise _UnknownError(f"{where}: 'format' is {brief(document['format'])}; expected {EXPECTED}")
        return noun
    if isinstance(document.get("traceEvents"), list):
        return _window(document, where)
    return _document(document, where)


class _UnknownError(FileError):
    """A whole file of another program: skipped in a folder, an error where it was named."""


def _is_step_line(first: bytes) -> bool:
    """Whether the first line is a JSON object with a step, maybe cut off, and so the file one of JSON lines."""
    try:
        value = parse_json(first, "", nan_as_none=True)
    except FileError:
        return first.startswith(FIRST_FIELD)
    return isinstance(value, dict) and "step" in value and "command" not in value


def _window(document: dict[str, Any], where: str) -> list[RankStep]:
    other = document.get("otherData")
    if not isinstance(other, dict) or other.get("made_by") != "anabranch":
        raise _UnknownError(
            f"{where}: is a Chrome trace that model.trace_steps did not write; open it in Perfetto, or give {EXPECTED}"
        )
    return rank_steps(document, where)


def _document(document: dict[str, Any], where: str) -> Document:
    command = document.get("command")
    if not isinstance(command, str) or command not in BY_COMMAND:
        has = f"the command {brief(command)}" if command is not None else f"the fields {brief(sorted(document)[:6])}"
        raise _UnknownError(f"{where}: holds a JSON object with {has}; expected {EXPECTED}")
    adapter: TypeAdapter[Document] = TypeAdapter(BY_COMMAND[command])
    try:
        # Once more through JSON: only from there a strict model takes a list for a tuple.
        return adapter.validate_json(json.dumps(document))
    except ValidationError as error:
        wrong = complaint(error.errors(include_url=False), command)
        raise FileError(f"{where}: {wrong}; write it again with anabranch {command} --json") from error


def _files_in(folder: Path) -> list[Path]:
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())
    except OSError as error:
        raise FileError(f"{folder}: cannot be read ({error.strerror})") from error
    if len(found) > MAX_FILES:
        raise FileError(f"{folder}: has {len(found)} files ending in .json[l]: expected {MAX_FILES} at most; name some")
    return found
