"""The nouns to and from versioned JSON files, validated on the way in, atomic on the way out."""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from anabranch.values.errors import FileError
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.sharded import ShardedTrace, ShardingPlan
from anabranch.values.timeline import Timeline
from anabranch.values.trace import Trace

Noun = Trace | Network | Plan | Timeline | ShardedTrace | ShardingPlan
AnyNoun = TypeVar("AnyNoun", Trace, Network, Plan, Timeline, ShardedTrace, ShardingPlan)

VERSION = 1
KINDS: Mapping[str, type[Noun]] = {
    "trace": Trace,
    "network": Network,
    "plan": Plan,
    "timeline": Timeline,
    "sharded_trace": ShardedTrace,
    "sharding_plan": ShardingPlan,
}
TRACES = Path(__file__).parent / "traces"
MAX_NBYTES = 256 << 20  # a trace of a million tensors has about 150 MB; more is a mistake or an attack


def load(path: str | os.PathLike[str]) -> Noun:
    """The noun in a file; FileError, naming file and field, if it does not hold exactly one valid noun."""
    path = Path(path)
    return loads(read_bytes(path), str(path))


def load_as(cls: type[AnyNoun], path: str | os.PathLike[str]) -> AnyNoun:
    """The noun in a file, which must be of this class; else FileError."""
    return expected(load(path), cls, path)


def expected(noun: Noun, cls: type[AnyNoun], where: str | os.PathLike[str]) -> AnyNoun:
    """This noun, if it is of this class; else FileError."""
    if not isinstance(noun, cls):
        words = {known: kind.replace("_", " ") for kind, known in KINDS.items()}
        raise FileError(f"{where}: holds a {words[type(noun)]}, expected a {words[cls]}")
    return noun


def bundled_traces() -> dict[str, Path]:
    """The files of the traces that come with the package, by name, sorted."""
    return {file.stem: file for file in sorted(TRACES.glob("*.json"))}


def load_bundled_trace(name: str) -> Trace:
    """The trace of this name that comes with the package; FileError, listing the names there are, if there is none."""
    files = bundled_traces()
    if name not in files:
        raise FileError(f"no trace of the name {name!r}: anabranch brings {', '.join(files) or 'none'}")
    trace = loads(files[name].read_bytes(), f"bundled trace {name}")
    assert isinstance(trace, Trace)
    return trace


def loads(text: bytes, where: str) -> Noun:
    """The noun in a JSON text; ``where`` names its origin in errors."""
    kind, content = opened(parse_json(text, where), where, KINDS)
    noun: Noun = validated(KINDS[kind], content, where)
    return noun


def opened(document: Any, where: str, formats: Collection[str]) -> tuple[str, dict[str, Any]]:
    """The format and the other fields of a document; FileError unless it has one of these formats and our version."""
    if not isinstance(document, dict):
        raise refused(where, f"holds a {type(document).__name__}, expected a JSON object with 'format' and 'version'")
    content = dict(document)
    kind = content.pop("format", None)
    if not isinstance(kind, str) or kind not in formats:
        expected = ("one of " if len(formats) > 1 else "") + ", ".join(formats)
        raise refused(where, f"'format' is {brief(kind)}, expected {expected}")
    version = content.pop("version", None)
    if type(version) is not int or version != VERSION:
        raise refused(
            where, f"'version' is {brief(version)}, this program reads version {VERSION}; upgrade or re-create it"
        )
    return kind, content


def dumps(noun: Noun) -> str:
    """The file content of a noun: fields in the order of their declaration, floats that read back the same."""
    return json_text(document_of(noun))


def document_of(noun: Noun) -> dict[str, Any]:
    """A noun as the JSON document of its file."""
    kind = next((name for name, cls in KINDS.items() if isinstance(noun, cls)), None)
    if kind is None:
        found, expected = type(noun).__name__, ", ".join(cls.__name__ for cls in KINDS.values())
        raise ValueError(f"cannot save a {found}: expected a {expected}")
    content = asdict(noun)
    if isinstance(noun, Network):  # fields that came later: without them, older programs can read the file
        for field in ("delays", "inside"):
            if not getattr(noun, field):
                del content[field]
    return {"format": kind, "version": VERSION, **content}


def json_text(document: Mapping[str, Any]) -> str:
    """A JSON document as the text of a file."""
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def save(noun: Noun, path: str | os.PathLike[str], force: bool = False) -> None:
    """Write a noun. An existing file is replaced only with ``force``; a crash leaves the old file or the new."""
    write_text(dumps(noun), path, force)


def write_text(text: str, path: str | os.PathLike[str], force: bool = False) -> None:
    """Write any output file under the same promises as ``save``."""
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise refused(str(path), f"a name or text cannot be written as UTF-8: {error}") from error
    write_bytes(content, path, force)


def write_bytes(content: bytes, path: str | os.PathLike[str], force: bool = False) -> None:
    """Write any output file under the same promises as ``save``."""
    path = Path(path)
    if os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113 (these answer for any name)
        kind = "a folder" if os.path.isdir(path) else "a device or pipe, which a file would take the place of"  # noqa: PTH112
        raise refused(str(path), f"is {kind}; choose the name of a file")
    # Its name is short whatever the file's is: a longer one than the file's could be more than the folder takes.
    temporary = path.parent / f".anabranch-{uuid4().hex}"
    try:
        file = temporary.open("xb")
    except OSError as error:
        raise refused(str(path), f"cannot write there ({error.strerror}); is the folder there and writable?") from error
    try:
        with file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if force:
            temporary.replace(path)
        else:
            os.link(temporary, path)  # unlike rename, fails if the file is there
    except FileExistsError as error:
        raise refused(
            str(path), "is already there; choose another name, or overwrite it with --force (force=True)"
        ) from error
    except OSError as error:
        raise refused(str(path), f"cannot be written ({error.strerror})") from error
    finally:
        temporary.unlink(missing_ok=True)


def read_bytes(path: Path) -> bytes:
    """The content of a file; FileError if it cannot be read or is larger than ``MAX_NBYTES``."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_NBYTES + 1)
    except (OSError, ValueError) as error:
        raise refused(str(path), f"cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if len(text) > MAX_NBYTES:
        raise refused(
            str(path), f"is larger than {MAX_NBYTES >> 20} MiB, which no file of ours is; is this the right file?"
        )
    return text


def parse_json(text: bytes, where: str, nan_as_none: bool = False) -> Any:
    """The content of a JSON text; FileError for NaN, for a duplicate field, and for text that is not JSON."""

    def refuse(constant: str) -> None:
        if not nan_as_none:
            raise ValueError(f"{constant} is not a JSON number")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for key, value in pairs:
            if key in fields:
                raise ValueError(f"the field {brief(key)} is there twice")
            fields[key] = value
        return fields

    try:
        return json.loads(text.decode("utf-8"), parse_constant=refuse, object_pairs_hook=once)
    except RecursionError as error:
        raise refused(where, "is nested too deeply to be one of our files") from error
    except ValueError as error:  # includes JSONDecodeError and UnicodeDecodeError
        raise refused(where, f"is not valid JSON: {error}") from error


def validated(cls: type, document: dict[str, Any], where: str) -> Any:
    """An instance of ``cls``, a frozen dataclass with ``STRICT`` checks, from the fields of a parsed JSON document."""
    from pydantic import ValidationError  # takes a tenth of a second, which most commands do not need

    try:
        # Once more through JSON, since only from there a list may become a tuple and nothing else may become anything.
        return _adapter(cls).validate_json(json.dumps(document))
    except ValidationError as error:
        found = _of_one_branch(error.errors(include_url=False))
        raise refused(where, complaint(found, cls.__name__.lower())) from error


@cache
def _adapter(cls: type) -> Any:
    """pydantic's validator of a class; it takes milliseconds to build."""
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def _of_one_branch(errors: list[Any]) -> list[Any]:
    """Where a field may be one of several things, pydantic reports what is wrong with each: keep the likeliest."""
    branches: dict[Any, list[Any]] = {}
    for error in errors:
        branches.setdefault(error["loc"][:2] if error["loc"][:1] == ("model",) else (), []).append(error)
    return min(branches.values(), key=len)


def refused(where: str, why: str) -> FileError:
    """An error about the content of a file, on one line, whatever the file put into it."""
    return FileError(f"{_harmless(where, 200)}: {_harmless(why, 260)}")


def complaint(found: Sequence[Any], whole: str) -> str:
    """The first of what pydantic found wrong, and how much more there is; ``whole`` is what all of it is called."""
    at = ".".join(str(part) for part in found[0]["loc"]) or whole
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{at}: {found[0]['msg']}, found {brief(found[0]['input'])}{more}"


def brief(value: object) -> str:
    """A value from a file, short and harmless, to be quoted in an error."""
    return _harmless(repr(value) if value is not None else "missing", 80)


def _harmless(text: str, longest: int) -> str:
    """Text from outside as one line of printable characters."""
    shown = plain(text[: longest + 1])
    return shown if len(shown) <= longest else shown[: longest - 3] + "..."


def plain(text: str) -> str:
    """``text`` with every non-printable character escaped, so that it cannot control a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
