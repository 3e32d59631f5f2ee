"""The values of --trace, --network, --plan and FILE: a path, a bundled trace, or a network by name or description."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from anabranch.tools.cli import network_text
from anabranch.tools.network_presets import PRESETS, NetworkRange
from anabranch.tuning.cache_files import FORMAT, Entry
from anabranch.values import files
from anabranch.values.errors import FileError
from anabranch.values.files import KINDS, Noun, expected
from anabranch.values.network import Network
from anabranch.values.trace import Trace

LEAST_RANKS = 2  # with a link between them
NO_COMPRESSION = "none"  # as the value of --compress


def trace(text: str) -> Trace:
    """The trace in a file, or the bundled one of this name."""
    return expected(_file_or_bundled(text), Trace, text)


def network(text: str) -> Network:
    """The network in a file, the one that the text describes, or a named one such as 10gbe:ranks=16."""
    name, _, rest = text.partition(":")
    if name in PRESETS:
        return NetworkRange.preset(name, network_text.ranks_of(name, rest)).middle
    if network_text.is_description(text):
        return network_text.network(text)
    if not _is_file(text):
        raise FileError(
            f"network {text!r}: no such file, no name ({', '.join(PRESETS)}), and no description of a network, such as "
            f"{network_text.EXAMPLES['ring']} (also {', '.join(network_text.EXAMPLES)})"
        )
    return files.load_as(Network, text)


def network_ranges(texts: Iterable[str]) -> list[NetworkRange]:
    """A range for each text, under its short name, or under the whole text if two would share a name."""
    found = {text: network_range(text) for text in texts}
    shared = Counter(known.name for known in found.values())
    return [replace(known, name=text) if shared[known.name] > 1 else known for text, known in found.items()]


def network_range(text: str) -> NetworkRange:
    """The network that the text means, with its band. A named network needs no number of ranks and has its own band."""
    name, _, rest = text.partition(":")
    if name in PRESETS:
        return NetworkRange.preset(name, network_text.ranks_of(name, rest) if rest else LEAST_RANKS)
    found = network(text)
    if network_text.is_description(text):
        return NetworkRange.given(text, found, "as described")
    name = Path(text).name
    measured = found.model is None and len(found.curve("dense").points) > 1
    return NetworkRange.given(name, found, f"{'measured' if measured else 'as described'}, in {name}")


def compressions(given: Sequence[str] | None, default: Sequence[str]) -> list[str]:
    """The values of --compress, each once; without any, the default."""
    return [] if given == [NO_COMPRESSION] else list(dict.fromkeys(given or default))


def content(text: str) -> Noun | Entry:
    """What a file holds, the bundled trace of this name, or the network that the text means."""
    if network_text.is_description(text) or text.partition(":")[0] in PRESETS:
        return network(text)
    if not _is_file(text):
        return _file_or_bundled(text)
    kind, fields = files.opened(files.parse_json(files.read_bytes(Path(text)), text), text, [*KINDS, FORMAT])
    if kind == FORMAT:
        return Entry.of_fields(fields, text)
    noun: Noun = files.validated(KINDS[kind], fields, text)
    return noun


def _file_or_bundled(text: str) -> Noun:
    if _is_file(text):
        return files.load(text)
    names = files.bundled_traces()
    if text in names:
        return files.load_bundled_trace(text)
    if os.path.isdir(text):  # noqa: PTH112 (unlike Path.is_dir, answers for a name too long to be one)
        raise FileError(f"{text}: is a folder, expected a file")
    raise FileError(f"{text}: no such file, and no trace of this name: anabranch brings {', '.join(names) or 'none'}")


def _is_file(text: str) -> bool:
    """Also true for a pipe, as the shell makes for <(...). ``Path`` would fail on a very long name."""
    return os.path.exists(text) and not os.path.isdir(text)  # noqa: PTH110, PTH112
