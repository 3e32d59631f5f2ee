"""The plan cache: what is written reads back the same, and no file and no folder ever stops a training."""

import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import anabranch as ab
from anabranch.tuning.cache_files import (
    CachedChoice,
    CacheKey,
    Entry,
    PlanCache,
    default_folder,
    plan_cache,
)
from anabranch.values import files
from samples import RINGS
from shorthand import bucket_of, plan_of, trace_of
from strategies import networks, plans_of, traces, words
from values.test_malformed_files import HOSTILE, damaged

TRACE = trace_of([ab.TensorSpec("a", 12, 4, 0.1), ab.TensorSpec("b", 3, 4, 0.1 + 0.2)], 1 / 3, {"model": "Net"})
CHOICE = CachedChoice(
    label="optimal, refined",
    step_s=0.1,
    spread_s=1e-3,
    default_step_s=0.12,
    date="2026-11-16",
    plan=plan_of([bucket_of(["a"], 1), bucket_of(["b"], 0, "oktopk")]),
    network=ab.Network.two_level(64, 8, *RINGS, eta=0.5),
    trace=TRACE,
)
KEY = CacheKey("Net", "input 8x2 float32", ("ranks 64", "a (3, 4)"), ("torch 2.13.0",))


@contextmanager
def lines() -> Iterator[list[str]]:
    """What the library's logger says, each message on one line."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("anabranch")
    log.addHandler(handler)
    try:
        yield found
    finally:
        log.removeHandler(handler)


def ignored(folder: Path, key: CacheKey = KEY) -> str:
    """The one line in the log when nothing can be read for this key."""
    with lines() as found:
        assert PlanCache(folder).read(key) is None
    (line,) = found
    assert line.startswith(f"anabranch: the plan cache ignores {folder / key.file_name}: ")
    assert line.isprintable() and len(line) < 600
    return line


def written(folder: Path, choice: CachedChoice = CHOICE, key: CacheKey = KEY) -> Path:
    PlanCache(folder).write(key, choice)
    return folder / key.file_name


def document(choice: CachedChoice = CHOICE) -> Any:
    return json.loads(Entry(KEY, choice).text())


# -------------------------------------------------------------------------------------------------- round trips


@st.composite
def choices(draw: st.DrawFn) -> CachedChoice:
    trace = draw(traces(any_name=True))
    seconds = st.floats(1e-9, 1e6)
    return CachedChoice(
        label=draw(words.filter(str.isprintable)),
        step_s=draw(seconds),
        spread_s=draw(seconds),
        default_step_s=draw(seconds),
        date="2026-11-16",
        plan=draw(st.none() | plans_of(trace)),
        network=draw(networks()),
        trace=trace,
    )


@given(choices(), words)
def test_what_is_written_reads_back_bit_by_bit(choice: CachedChoice, model: str) -> None:
    entry = Entry(CacheKey(model, "zero", ("one", "two"), ("three",)), choice)
    back = Entry.of(entry.text(), "here")
    assert back == entry and back.text() == entry.text()


@pytest.mark.parametrize("plan", [CHOICE.plan, None], ids=["a plan", "the layout's own buckets"])
def test_a_folder_keeps_a_choice(plan: ab.Plan | None, tmp_path: Path) -> None:
    cache, choice = PlanCache(tmp_path / "made" / "by it"), replace(CHOICE, plan=plan)
    with lines() as found:
        assert cache.read(KEY) is None, "nothing is there, which is no reason for a line"
        cache.write(KEY, choice)
        assert cache.read(KEY) == choice
        cache.write(KEY, replace(choice, label="another"))
        assert cache.read(KEY) == replace(choice, label="another"), "the last choice counts"
    assert found == []
    assert [path.name for path in cache.folder.iterdir()] == [KEY.file_name], "no temporary file is left"
    assert cache.files() == [cache.folder / KEY.file_name]


def test_the_newest_choice_for_any_input(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    assert cache.newest(KEY) is None and PlanCache(tmp_path / "none").newest(KEY) is None
    for age, (name, key) in enumerate(
        {
            "another batch": replace(KEY, input="input 9x2 float32"),
            "an older one": replace(KEY, input="input 7x2 float32"),
            "other ranks": replace(KEY, training=("ranks 65", "a (3, 4)")),
            "another version": replace(KEY, input="input 6x2 float32", versions=("torch 9",)),
        }.items()
    ):
        cache.write(key, replace(CHOICE, label=name))
        os.utime(tmp_path / key.file_name, (1e9 - age, 1e9 - age))
    (tmp_path / replace(KEY, input="broken").file_name).write_text("not a plan")
    with lines() as said:
        found = cache.newest(KEY)
        assert found is not None and found.choice.label == "another batch" and found.key.input == "input 9x2 float32"
        older = cache.newest(KEY, lambda choice: 1 / (choice.label != "another batch"))
        assert older is not None and older.choice.label == "an older one", "the newest that fits"
    assert said == [], "what cannot be used is the business of read()"


def test_where_no_folder_can_be_listed_there_is_no_newest_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied", str(self))

    for folder in (tmp_path / ("n" * 300), Path("\0")):
        assert PlanCache(folder).newest(KEY) is None
    written(tmp_path)
    monkeypatch.setattr(Path, "iterdir", denied)
    assert PlanCache(tmp_path).newest(KEY) is None


def test_a_person_can_read_the_file(tmp_path: Path) -> None:
    content = json.loads(written(tmp_path).read_text())
    assert list(content)[:2] == ["format", "version"] and content["format"] == "cached plan"
    assert content["key"]["training"] == ["ranks 64", "a (3, 4)"]
    assert content["choice"]["step_s"] == 0.1
    for name in ("plan", "network", "trace"):
        assert content["choice"][name] == json.loads(files.dumps(getattr(CHOICE, name)))


def test_every_noun_in_the_file_loads_by_itself(tmp_path: Path) -> None:
    content = json.loads(written(tmp_path).read_text())
    (tmp_path / "plan.json").write_text(json.dumps(content["choice"]["plan"]))
    assert ab.load(tmp_path / "plan.json") == CHOICE.plan


@pytest.mark.parametrize("model", ["", "../../etc/passwd", "Ä" * 300, "a b\n\0", "Net"])
def test_any_name_of_a_model_makes_a_file_in_the_folder(model: str, tmp_path: Path) -> None:
    key = replace(KEY, model=model)
    path = written(tmp_path, key=key)
    assert path.parent == tmp_path and path.is_file() and path in PlanCache(tmp_path).files()
    assert PlanCache(tmp_path).read(key) == CHOICE


def test_names_differ_by_training_and_model_and_not_by_version() -> None:
    others = [replace(KEY, model="Other"), replace(KEY, training=("ranks 64",)), replace(KEY, training=())]
    assert len({key.file_name for key in (KEY, *others)}) == 4
    assert replace(KEY, versions=("torch 9",)).file_name == KEY.file_name


@pytest.mark.parametrize(
    "change",
    [
        {"step_s": 0.0},
        {"step_s": float("nan")},
        {"default_step_s": float("inf")},
        {"spread_s": -1.0},
        {"label": ""},
        {"label": "\x1b]0;title\x07"},
        {"date": "yesterday"},
        {"plan": plan_of([bucket_of(["a"])])},
        {"plan": plan_of([bucket_of(["a", "b", "c"])])},
    ],
    ids=str,
)
def test_a_choice_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        replace(CHOICE, **change)


# ------------------------------------------------------------------------------------------------ files to ignore


def put(place: str, value: object) -> bytes:
    """The file with one place of it changed."""
    whole = document()
    *way, last = place.split("/")
    at = whole
    for step in way:
        at = at[step]
    at[last] = value
    return json.dumps(whole).encode()


GOOD = Entry(KEY, CHOICE).text()
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not valid JSON"),
    "binary": (bytes(range(256)), "not valid JSON"),
    "truncated": (GOOD[: len(GOOD) // 2], "not valid JSON"),
    "NaN": (GOOD.replace(b'"step_s": 0.1', b'"step_s": NaN'), "NaN is not a JSON number"),
    "nested": (b"[" * 100_000, "nested too deeply"),
    "another noun": (files.dumps(TRACE).encode(), "'format' is 'trace', expected cached plan"),
    "another format": (put("format", "pickle"), "'format' is 'pickle'"),
    "another version": (put("version", 2), "'version' is 2, this program reads version 1"),
    "a list": (b"[]", "holds a list"),
    "no choice": (put("choice", None), "choice: "),
    "a choice of text": (put("choice", "optimal"), "choice: "),
    "a plan in place of the trace": (put("choice/trace", document()["choice"]["plan"]), "'format' is 'plan'"),
    "a bare trace": (put("choice/trace", {"tensors": []}), "trace: 'format' is missing"),
    "no network": (put("choice/network", None), "choice.network: "),
    "a text for a number": (put("choice/step_s", "0.1"), "choice.step_s: "),
    "an infinite number": (GOOD.replace(b'"step_s": 0.1', b'"step_s": 1e999'), "choice.step_s: "),
    "a field more": (put("choice/run", "rm -rf /"), "choice.run: Unexpected"),
    "no key": (put("key", None), "key: "),
    "a plan of other gradients": (put("choice/trace/tensors", [document()["choice"]["trace"]["tensors"][0]]), "plan"),
    "another training": (put("key/training", ["ranks 64", "b"]), "is of another training: it has 'b'"),
    "a longer key": (put("key/training", ["ranks 64", "a (3, 4)", "x"]), "it has 'x', expected missing"),
    "another model": (put("key/model", "Other"), "is of another training: it has 'Other', expected 'Net'"),
    "another torch": (
        put("key/versions", ["torch 2.11.0"]),
        "is stale: it has 'torch 2.11.0', expected 'torch 2.13.0'",
    ),
    "control characters": (put("key/model", "\x1b[2J\n" * 100), "is of another training"),
}


@pytest.mark.parametrize(("content", "says"), BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_ignored_with_one_line_and_replaced(content: bytes, says: str, tmp_path: Path) -> None:
    assert content != GOOD
    (tmp_path / KEY.file_name).write_bytes(content)
    assert says in ignored(tmp_path)
    written(tmp_path)
    assert PlanCache(tmp_path).read(KEY) == CHOICE


def test_a_choice_that_does_not_fit_is_ignored_with_one_line(tmp_path: Path) -> None:
    def check(choice: CachedChoice) -> None:
        raise ab.PlanError("the plan names b, which this model does not train")

    written(tmp_path)
    with lines() as found:
        assert PlanCache(tmp_path).read(KEY, check) is None
    place = tmp_path / KEY.file_name
    assert found == [f"anabranch: the plan cache ignores {place}: the plan names b, which this model does not train"]


def test_a_huge_file_is_ignored(tmp_path: Path) -> None:
    with written(tmp_path).open("r+b") as file:
        file.truncate(files.MAX_NBYTES + 1)  # without using the disk
    assert "is larger than 256 MiB" in ignored(tmp_path)


def test_a_file_of_another_user_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, *args: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    written(tmp_path)
    monkeypatch.setattr(Path, "open", denied)
    assert "cannot be read (Permission denied)" in ignored(tmp_path)


def test_a_folder_or_a_pipe_in_place_of_the_file_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / KEY.file_name
    path.mkdir()
    assert "is not a regular file" in ignored(tmp_path)
    with lines() as found:
        written(tmp_path)
    assert len(found) == 1 and "cannot keep" in found[0] and "is a folder" in found[0] and path.is_dir()
    path.rmdir()
    os.mkfifo(path)  # reading it would wait for ever
    assert "is not a regular file" in ignored(tmp_path)


def test_a_link_is_read_and_replaced_but_never_written_through(tmp_path: Path) -> None:
    target = written(tmp_path / "elsewhere")
    before = target.read_bytes()
    link = tmp_path / KEY.file_name
    link.symlink_to(target)
    assert PlanCache(tmp_path).read(KEY) == CHOICE
    written(tmp_path, replace(CHOICE, label="new"))
    assert target.read_bytes() == before and not link.is_symlink()
    link.unlink()
    link.symlink_to(link)
    ignored(tmp_path)
    link.unlink()
    link.symlink_to(tmp_path / "nowhere")
    with lines() as found:
        assert PlanCache(tmp_path).read(KEY) is None, "a link to nowhere is as good as no file"
    assert found == []


@contextmanager
def no_superuser() -> Iterator[None]:
    """Within this context the kernel's rights of folders hold, also where tests run as root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("place", ["forbidden/.cache/plans", "n" * 300, "file/plans", "readable/plans"])
def test_a_whole_training_with_a_folder_that_cannot_be_used_has_one_line(place: str) -> None:
    """As in a container whose user may not enter HOME."""
    with TemporaryDirectory() as folder, lines() as found:  # pytest's own folders are for their owner alone
        Path(folder).chmod(0o755)
        Path(folder, "forbidden").mkdir(mode=0)
        Path(folder, "readable").mkdir(mode=0o555)
        Path(folder, "file").write_text("not a folder")
        with no_superuser():
            cache = PlanCache(Path(folder, place))
            assert cache.newest(KEY) is None and cache.read(KEY) is None
            for _ in range(3):  # a choice after every search
                cache.write(KEY, CHOICE)
    (line,) = found
    assert "anabranch: the plan cache " in line and line.isprintable()


@pytest.mark.parametrize("name", ["file", "n" * 300, "\0"])
def test_a_folder_that_cannot_be_written_costs_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with lines() as found:
        PlanCache(tmp_path / name).write(KEY, CHOICE)
    (line,) = found
    assert "anabranch: the plan cache cannot keep " in line and "the next start searches again" in line
    assert line.isprintable()


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    written(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    with lines() as found:
        written(tmp_path, replace(CHOICE, label="new"))
    assert len(found) == 1 and "No space left" in found[0]
    assert PlanCache(tmp_path).read(KEY) == CHOICE
    assert [path.name for path in tmp_path.iterdir()] == [KEY.file_name]


def test_writers_and_readers_at_once_see_whole_files_only(tmp_path: Path) -> None:
    cache, seen = PlanCache(tmp_path), set()
    several = [replace(CHOICE, label=f"writer {number}") for number in range(4)]

    def work(choice: CachedChoice) -> None:
        for _ in range(8):
            cache.write(KEY, choice)
            found = cache.read(KEY)
            assert found is not None
            seen.add(found)

    with lines() as found:
        threads = [threading.Thread(target=work, args=(choice,)) for choice in several]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert found == [] and seen <= set(several) and cache.read(KEY) in several


@given(st.binary(max_size=200))
def test_random_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("random")
    (folder / KEY.file_name).write_bytes(content)
    ignored(folder)


@settings(max_examples=200)
@given(damaged(HOSTILE, st.builds(document)))
def test_a_damaged_file_is_read_or_ignored_with_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: Any
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    (folder / KEY.file_name).write_text(json.dumps(content))
    with lines() as found:
        choice = PlanCache(folder).read(KEY)
    assert (choice is None) == (len(found) == 1)
    assert all(line.isprintable() for line in found)


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 0xFF))
def test_a_flipped_byte_is_read_or_ignored(tmp_path_factory: pytest.TempPathFactory, place: int, byte: int) -> None:
    folder = tmp_path_factory.mktemp("flipped")
    content = bytearray(GOOD)
    content[place] = byte
    (folder / KEY.file_name).write_bytes(content)
    with lines() as found:
        choice = PlanCache(folder).read(KEY)
    assert (choice is None) == (len(found) == 1)


# ------------------------------------------------------------------------------------------------------- folders


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"ANABRANCH_CACHE": "/plans", "XDG_CACHE_HOME": "/xdg"}, "/plans"),
        ({"ANABRANCH_CACHE": "off", "XDG_CACHE_HOME": "/xdg"}, None),
        ({"ANABRANCH_CACHE": "OFF"}, None),
        ({"ANABRANCH_CACHE": ""}, None),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/anabranch/plans"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/anabranch/plans"),
        ({"XDG_CACHE_HOME": ""}, "/home/me/.cache/anabranch/plans"),
        ({}, "/home/me/.cache/anabranch/plans"),
    ],
    ids=str,
)
def test_the_default_folder(variables: dict[str, str], folder: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert default_folder(variables) == (None if folder is None else Path(folder))


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert default_folder({}) is None


def test_the_argument_beats_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folder(cache: Any) -> Path | None:
        found = plan_cache(cache)
        return None if found is None else found.folder

    assert folder(None) is None and folder(True) is None, "tests run with the cache off"
    assert folder(tmp_path) == folder(str(tmp_path)) == tmp_path
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path))
    assert folder(None) == folder(True) == tmp_path
    assert folder(False) is None


def test_only_files_of_the_cache_are_listed(tmp_path: Path) -> None:
    path = written(tmp_path)
    for name in ("notes.json", ".hidden.json", f".{path.name}.x7", f"{path.name}.bak", "Net-0123.json"):
        (tmp_path / name).write_text("mine")
    assert PlanCache(tmp_path).files() == [path]
    assert PlanCache(tmp_path / "nowhere").files() == []
