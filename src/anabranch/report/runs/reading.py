"""Files and folders to what they hold, whatever wrote them."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from anabranch.errors import FileError
from anabranch.files import KINDS, brief, complaint, loads, parse_json, read_bytes
from anabranch.network import Network
from anabranch.plan import Plan
from anabranch.report.runs.documents import (
    COMMANDS,
    Bench,
    Comparison,
    Demo,
    Document,
    Memory,
    PlannedStep,
)  # fmt: skip
from anabranch.report.runs.training import Training, trainings
from anabranch.report.runs.window import RankStep, rank_steps
from anabranch.scaling.result import Scaling
from anabranch.timeline import Timeline
from anabranch.trace import Trace

EXPECTED = (
    "a trace, network, plan or timeline, what --json of "
    f"{', '.join(COMMANDS)} prints, lines of ab.JsonLines, or a trace of model.trace_steps"
)
ENDINGS = (".json", ".jsonl")
FIRST_FIELD = b'{"step"'  # of a line of ab.JsonLines, even of one that broke off
MAX_FILES = 200  # of a folder: a page of more would help nobody

Content = Trace | Network | Plan | Timeline | Scaling | Document | list[RankStep] | list[Training]


@dataclass(slots=True)
class Runs:
    """Everything that was read, by kind, each with the name of its file; and what was not."""

    files: list[tuple[str, str]] = field(default_factory=list)  # name, what it was taken for
    left_out: list[str] = field(default_factory=list)
    traces: list[tuple[str, Trace]] = field(default_factory=list)
    networks: list[tuple[str, Network]] = field(default_factory=list)
    plans: list[tuple[str, Plan]] = field(default_factory=list)
    timelines: list[tuple[str, Timeline]] = field(default_factory=list)
    windows: list[tuple[str, list[RankStep]]] = field(default_factory=list)
    steps: list[tuple[str, PlannedStep]] = field(default_factory=list)
    comparisons: list[tuple[str, Comparison]] = field(default_factory=list)
    scalings: list[tuple[str, Scaling]] = field(default_factory=list)
    memories: list[tuple[str, Memory]] = field(default_factory=list)
    benches: list[tuple[str, Bench]] = field(default_factory=list)
    demos: list[tuple[str, Demo]] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)

    def add(self, name: str, content: Content) -> None:
        """Put something where it belongs."""
        if isinstance(content, list):
            if content and isinstance(content[0], RankStep):
                self.windows.append((name, [one for one in content if isinstance(one, RankStep)]))
                kind = f"step {content[0].step} of {len(content)} ranks"
            else:
                self.trainings += [one for one in content if isinstance(one, Training)]
                kind = f"{sum(len(one.lines) for one in content if isinstance(one, Training)):,} lines of a training"
        else:
            places: dict[type[Any], tuple[list[Any], str]] = {
                Trace: (self.traces, "trace"),
                Network: (self.networks, "network"),
                Plan: (self.plans, "plan"),
                Timeline: (self.timelines, "timeline"),
                PlannedStep: (self.steps, "predicted step"),
                Comparison: (self.comparisons, "comparison of planners"),
                Scaling: (self.scalings, "scaling"),
                Memory: (self.memories, "memory"),
                Bench: (self.benches, "benchmark"),
                Demo: (self.demos, "demo"),
            }
            place, kind = places[type(content)]
            place.append((name, content))
        self.files.append((name, kind))


def read_runs(paths: Iterable[Path]) -> Runs:
    """What these files hold, and the files of these folders; FileError for one that is broken or not known.

    What a folder has beside the files that are known is left out, and named.
    """
    runs = Runs()
    for path in paths:
        if not os.path.isdir(path):  # noqa: PTH112 (unlike Path.is_dir, answers for a name too long to be one)
            runs.add(path.name, recognised(read_bytes(path), str(path)))
            continue
        before = len(runs.files)
        for inner in _inside(path):
            try:
                runs.add(inner.name, recognised(read_bytes(inner), str(inner)))
            except _UnknownError as error:
                runs.left_out.append(str(error))
        if len(runs.files) == before:
            raise FileError(f"{path}: a folder without a file that is known; expected {EXPECTED}, ending in .json[l]")
    return runs


def recognised(text: bytes, where: str) -> Content:
    """The content of a file by what is in it, never by its name; FileError if it is none of ours, or broken."""
    if not text.strip():
        raise FileError(f"{where}: is empty; the command that was to write it may have failed: run it again")
    first = text.lstrip()[: 1 << 20].split(b"\n", 1)[0]
    if _is_line(first) or first.startswith(FIRST_FIELD):
        return trainings(text, where, Path(where).name)
    try:
        document = parse_json(text, where)
    except FileError as error:
        raise FileError(f"{error}; expected {EXPECTED}") from error
    if not isinstance(document, dict):
        raise _UnknownError(f"{where}: holds a JSON {type(document).__name__}; expected {EXPECTED}")
    if "format" in document:
        if not isinstance(document["format"], str) or document["format"] not in KINDS:
            raise _UnknownError(f"{where}: 'format' is {brief(document['format'])}; expected {EXPECTED}")
        return loads(text, where)
    if isinstance(document.get("traceEvents"), list):
        return _window(document, where)
    return _document(document, where)


class _UnknownError(FileError):
    """A file that says of itself to be something else: in a folder, not ours to read."""


def _is_line(first: bytes) -> bool:
    """Whether a file begins with a whole object that counts a step."""
    try:
        value = parse_json(first, "", nan_as_none=True)
    except FileError:
        return False
    return isinstance(value, dict) and "step" in value and "command" not in value


def _window(document: dict[str, Any], where: str) -> list[RankStep]:
    other = document.get("otherData")
    if not isinstance(other, dict) or other.get("made_by") != "anabranch":
        raise _UnknownError(
            f"{where}: is a Chrome trace that model.trace_steps did not write; open it in Perfetto, "
            f"or give {EXPECTED}"
        )  # fmt: skip
    return rank_steps(document, where)


def _document(document: dict[str, Any], where: str) -> Document | Scaling:
    command = document.get("command")
    if not isinstance(command, str) or command not in COMMANDS:
        has = f"the command {brief(command)}" if command is not None else f"the fields {brief(sorted(document)[:6])}"
        raise _UnknownError(f"{where}: holds a JSON object with {has}; expected {EXPECTED}")
    try:
        # Once more through JSON: only from there a strict model takes a list for a tuple.
        return TypeAdapter(COMMANDS[command]).validate_json(json.dumps(document))
    except ValidationError as error:
        wrong = complaint(error.errors(include_url=False), command)
        raise FileError(f"{where}: {wrong}; write it again with anabranch {command} --json") from error


def _inside(folder: Path) -> list[Path]:
    try:
        inner = sorted(path for path in folder.iterdir() if path.suffix in ENDINGS and path.is_file())
    except OSError as error:
        raise FileError(f"{folder}: cannot be read ({error.strerror})") from error
    if len(inner) > MAX_FILES:
        raise FileError(f"{folder}: has {len(inner)} files ending in .json[l]: expected {MAX_FILES} at most; name some")
    return inner
