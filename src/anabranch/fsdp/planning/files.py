"""Sharded traces and sharding plans to and from JSON files, under the promises of ``anabranch.values.files``."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from anabranch.fsdp.planning.plan import ShardingPlan
from anabranch.fsdp.planning.trace import ShardedTrace
from anabranch.values.files import (
    VERSION,
    json_text,
    opened,
    parse_json,
    read_bytes,
    refused,
    validated,
    write_text,
)

Sharded = TypeVar("Sharded", ShardedTrace, ShardingPlan)

FORMATS: Mapping[type[ShardedTrace] | type[ShardingPlan], str] = {
    ShardedTrace: "sharded_trace",
    ShardingPlan: "sharding_plan",
}


def load(cls: type[Sharded], path: str | os.PathLike[str]) -> Sharded:
    """The trace or plan in a file; FileError, naming file and field, if it does not hold exactly that."""
    return loads(cls, read_bytes(Path(path)), str(path))


def loads(cls: type[Sharded], text: bytes, where: str) -> Sharded:
    """The trace or plan in a JSON text; ``where`` names its origin in errors."""
    _, content = opened(parse_json(text, where), where, (FORMATS[cls],))
    found: Sharded = validated(cls, content, where)
    return found


def save(noun: ShardedTrace | ShardingPlan, path: str | os.PathLike[str], force: bool = False) -> None:
    """Write a trace or plan. An existing file is replaced only with ``force``."""
    try:
        write_text(dumps(noun), path, force)
    except UnicodeEncodeError as error:
        raise refused(str(path), f"a name or text cannot be written as UTF-8: {error}") from error


def dumps(noun: ShardedTrace | ShardingPlan) -> str:
    """The content of a file; floats read back the same."""
    if type(noun) not in FORMATS:
        expected = " or ".join(cls.__name__ for cls in FORMATS)
        raise ValueError(f"cannot save a {type(noun).__name__}: expected a {expected}; for others there is ab.save")
    return json_text({"format": FORMATS[type(noun)], "version": VERSION, **asdict(noun)})
