"""The plan cache: what earlier trainings chose, one readable file per training.

A cache must never stop a training: what is wrong with a file or folder is one line in the log.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from stat import S_ISREG
from typing import Any, ClassVar

from anabranch.values import files
from anabranch.values.checks import STRICT, check_positive, check_seconds
from anabranch.values.errors import FileError, PlanError
from anabranch.values.files import brief, opened, refused
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

log = logging.getLogger("anabranch")

FORMAT = "cached plan"
VARIABLE = "ANABRANCH_CACHE"
OFF = "off"
NOUNS = ("plan", "network", "trace")
MOST_LOOKED_AT = 32  # files of models of the same class, at a start
FILE_NAME = re.compile(r"[\w.-]{1,64}-[0-9a-f]{16}\.json", re.ASCII)

Folder = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What a choice depends on.

    model      class of the model; the file's name begins with it
    input      a line with the batch
    training   lines that tell one training from another; the file's name ends with their digest
    versions   of the programs, not in the file's name: a new version replaces the file of an old one
    """

    model: str
    input: str
    training: tuple[str, ...]
    versions: tuple[str, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """All but the versions."""
        return self.model, self.input, *self.training

    @property
    def file_name(self) -> str:
        """The name of the file in a cache's folder."""
        digest = sha256("\n".join(self.lines).encode(errors="replace")).hexdigest()
        return f"{self.prefix}{digest[:16]}.json"

    @property
    def prefix(self) -> str:
        """What the names of all files for this model begin with."""
        return (re.sub(r"[^A-Za-z0-9_.-]", "_", self.model)[:64] or "_") + "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedChoice:
    """What a search has chosen, and from what.

    plan             None if the layout's own buckets were fastest
    step_s           median step of the choice; ``spread_s`` is its interquartile range
    default_step_s   median step under the layout's own buckets
    date             of the search, such as "2026-11-16"
    parts            gradients that leave a compiled model together; None if its graphs were cut finely, or never
    """

    label: str
    step_s: float
    spread_s: float
    default_step_s: float
    date: str
    plan: Plan | None
    network: Network
    trace: Trace
    parts: tuple[tuple[str, ...], ...] | None = None

    def __post_init__(self) -> None:
        for name in ("step_s", "spread_s", "default_step_s"):
            check_seconds(name, getattr(self, name))
        check_positive("step_s", self.step_s)
        check_positive("default_step_s", self.default_step_s)
        if not self.label or not self.label.isprintable():  # explain() shows it as it is
            raise ValueError(f"label is {brief(self.label)}: expected the name of the choice, in printable characters")
        date.fromisoformat(self.date)
        if self.plan is not None:
            try:
                self.plan.check(self.trace)
            except PlanError as error:
                raise ValueError(str(error)) from error

    @property
    def gain(self) -> float:
        """How many times as fast as the layout's own buckets."""
        return self.default_step_s / self.step_s


@dataclass(frozen=True, slots=True)
class Entry:
    """The content of one file of the cache."""

    __pydantic_config__: ClassVar = STRICT

    key: CacheKey
    choice: CachedChoice

    def text(self) -> bytes:
        """The content of the file; each noun in it is written as in a file of its own."""
        choice = {field.name: getattr(self.choice, field.name) for field in fields(self.choice)}
        choice |= {name: files.document_of(choice[name]) for name in NOUNS if choice[name] is not None}
        return files.json_text(
            {"format": FORMAT, "version": files.VERSION, "key": asdict(self.key), "choice": choice}
        ).encode()

    @classmethod
    def of(cls, text: bytes, where: str) -> "Entry":
        """The entry in the content of a file; FileError if it holds anything else. ``where`` is named in errors."""
        return cls.of_fields(opened(files.parse_json(text, where), where, (FORMAT,))[1], where)

    @classmethod
    def of_fields(cls, content: Mapping[str, Any], where: str) -> "Entry":
        """The entry in the fields of a parsed file; FileError if they hold anything else."""
        choice = content.get("choice")
        if isinstance(choice, dict):
            nouns = {name: choice[name] for name in NOUNS if choice.get(name) is not None}
            bare = {name: opened(noun, f"{where}: {name}", (name,))[1] for name, noun in nouns.items()}
            content = {**content, "choice": {**choice, **bare}}
        entry: Entry = files.validated(cls, dict(content), where)
        return entry

    @classmethod
    def read(cls, path: Path) -> "Entry":
        """The entry in a file; FileNotFoundError if there is none, FileError or OSError if it cannot be read."""
        if not S_ISREG(path.stat().st_mode):  # reading a pipe would wait for its writer
            raise refused(str(path), "is not a regular file")
        return cls.of(files.read_bytes(path), str(path))


class PlanCache:
    """The files of a folder, which is made when the first one is written. No method raises an error about a file.

    A folder that cannot be used is one line, not one for every choice: from then on nothing is written.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = Path(folder)
        self._is_unusable = False

    def read(self, key: CacheKey, check: Callable[[CachedChoice], object] = bool) -> CachedChoice | None:
        """The choice for this key, or None if there is none that can be used; ``check`` raises if one does not fit."""
        path = self.folder / key.file_name
        try:
            entry = Entry.read(path)
            _check_key(entry.key, key, str(path))
            check(entry.choice)
        except (FileNotFoundError, NotADirectoryError):  # where the folder is a file, writing will say so
            return None
        except Exception as error:  # whatever is wrong with a file, training goes on
            self._is_unusable |= isinstance(error, OSError)  # not even opened: its folder may not be entered
            log.warning("anabranch: the plan cache ignores %s", _about(path, error))
            return None
        return entry.choice

    def newest(self, key: CacheKey, check: Callable[[CachedChoice], object] = bool) -> Entry | None:
        """The newest entry for this key whatever its input, or None; says nothing of files that cannot be used."""
        paths: list[Path] = []
        with suppress(Exception):  # a folder that may not be entered, or a name that none can have
            paths = [path for path in self.files() if path.name.startswith(key.prefix)]
            paths.sort(key=lambda path: path.lstat().st_mtime, reverse=True)
        for path in paths[:MOST_LOOKED_AT]:
            with suppress(Exception):  # ``read`` will say what is wrong with it
                entry = Entry.read(path)
                _check_key(replace(entry.key, input=key.input), key, str(path))
                check(entry.choice)
                return entry
        return None

    def write(self, key: CacheKey, choice: CachedChoice) -> None:
        """Keep this choice under this key, in place of an earlier one; a reader sees the old file or the new."""
        if self._is_unusable:
            return
        path = self.folder / key.file_name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            files.write_bytes(Entry(key, choice).text(), path, force=True)
        except Exception as error:  # as above
            self._is_unusable = True
            log.warning("anabranch: the plan cache cannot keep %s; the next start searches again", _about(path, error))

    def files(self) -> Sequence[Path]:
        """The files of the cache, by name; none if there is no such folder. OSError if it cannot be read."""
        if not self.folder.exists():
            return []
        return sorted(path for path in self.folder.iterdir() if FILE_NAME.fullmatch(path.name) and not path.is_dir())


def plan_cache(cache: Folder | bool | None) -> PlanCache | None:
    """The cache that ``DataParallel(cache=...)`` asks for; None if it is off."""
    folder = default_folder() if cache is None or cache is True else cache
    return PlanCache(folder) if folder is not None and folder is not False else None


def default_folder(variables: Mapping[str, str] = os.environ) -> Path | None:
    """``$ANABRANCH_CACHE``, or anabranch/plans in the user's cache folder; None if the variable is empty or "off"."""
    given = variables.get(VARIABLE)
    if given is not None:
        return None if given.strip().lower() in ("", OFF) else Path(given)
    base = Path(variables.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # also where it is not set
        try:
            base = Path.home() / ".cache"
        except RuntimeError:  # a user without a home folder
            return None
    return base / "anabranch" / "plans"


def _check_key(found: CacheKey, expected: CacheKey, where: str) -> None:
    """FileError unless both keys are the same; it names the first difference."""
    for what, one, other in (
        ("of another training", found.lines, expected.lines),
        ("stale", found.versions, expected.versions),
    ):
        for theirs, ours in zip_longest(one, other):
            if theirs != ours:
                raise refused(where, f"is {what}: it has {brief(theirs)}, expected {brief(ours)}")


def _about(path: Path, error: Exception) -> str:
    """The error on one line that begins with the path."""
    return str(error) if isinstance(error, FileError) else str(refused(str(path), str(error) or repr(error)))
