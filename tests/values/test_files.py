"""Files: what is written reads back the same, and nothing is overwritten or half written."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings

from anabranch import FileError, Plan, TensorSpec, load, save
from anabranch.values import files
from anabranch.values.files import Noun, dumps, loads
from samples import EXAMPLES, IDS, TRACE, document
from shorthand import trace_of
from strategies import nouns, plans


def types(value: object) -> object:
    """A value with its types spelt out, since 1 == 1.0 == True."""
    if isinstance(value, list):
        return [types(item) for item in value]
    if isinstance(value, dict):
        return {key: types(item) for key, item in value.items()}
    return type(value).__name__, value


# -------------------------------------------------------------------------------------------------- round trips


@settings(max_examples=300)
@given(nouns)
def test_what_is_written_reads_back_the_same(noun: Noun) -> None:
    text = dumps(noun)
    back = loads(text.encode(), "here")
    assert back == noun
    assert type(back) is type(noun)
    assert dumps(back) == text
    assert types(json.loads(dumps(back))) == types(json.loads(text))
    assert hash(back) == hash(noun)


@given(plans())
def test_a_plan_keeps_its_fingerprint(plan: Plan) -> None:
    back = loads(dumps(plan).encode(), "here")
    assert isinstance(back, Plan)
    assert back.fingerprint == plan.fingerprint


@pytest.mark.parametrize("noun", EXAMPLES, ids=IDS)
def test_save_and_load(noun: Noun, tmp_path: Path) -> None:
    save(noun, tmp_path / "noun.json")
    assert load(tmp_path / "noun.json") == noun
    assert load(str(tmp_path / "noun.json")) == noun
    back = load(tmp_path / "noun.json")
    if not isinstance(back, Plan):
        with pytest.raises(TypeError):
            back.meta["x"] = 1  # type: ignore[index, union-attr]


def test_the_head_of_a_file() -> None:
    whole = document()
    assert list(whole) == ["format", "version", "tensors", "forward_s", "meta"]
    assert (whole["format"], whole["version"]) == ("trace", 1)
    assert [document(noun)["format"] for noun in EXAMPLES] == ["trace", "network", "network", "plan", "timeline"]


def test_defaults_may_be_left_out() -> None:
    text = '{"format":"trace","version":1,"tensors":[{"name":"a","numel":1,"itemsize":4,"ready_s":1}],"forward_s":0}'
    assert loads(text.encode(), "here") == trace_of([TensorSpec("a", 1, 4, 1.0)], 0.0)


def test_only_nouns_are_written() -> None:
    with pytest.raises(ValueError, match="cannot save a dict: expected a Trace, Network, Plan, Timeline"):
        dumps({})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- reading disks


def refusal(action: Callable[[], object], path: Path) -> str:
    with pytest.raises(FileError) as caught:
        action()
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_unreadable_paths(tmp_path: Path) -> None:
    missing, loop = tmp_path / "missing.json", tmp_path / "loop.json"
    loop.symlink_to(loop)
    plain = tmp_path / "plain"
    plain.write_text("x")
    assert "No such file" in refusal(lambda: load(missing), missing)
    assert "Is a directory" in refusal(lambda: load(tmp_path), tmp_path)
    assert "symbolic links" in refusal(lambda: load(loop), loop)
    assert "Not a directory" in refusal(lambda: load(plain / "a.json"), plain / "a.json")
    assert "not valid JSON" in refusal(lambda: load(plain), plain)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    save(TRACE, path)
    path.chmod(0)
    assert "Permission denied" in refusal(lambda: load(path), path)


def test_a_link_to_a_file_is_that_file(tmp_path: Path) -> None:
    save(TRACE, tmp_path / "trace.json")
    (tmp_path / "link.json").symlink_to(tmp_path / "trace.json")
    assert load(tmp_path / "link.json") == TRACE


def test_a_huge_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    save(TRACE, path)
    size = path.stat().st_size
    monkeypatch.setattr(files, "MAX_NBYTES", size)
    assert load(path) == TRACE
    monkeypatch.setattr(files, "MAX_NBYTES", size - 1)
    assert "larger than" in refusal(lambda: load(path), path)
    assert files.VERSION == 1


# ------------------------------------------------------------------------------------------------- writing disks


def test_no_overwriting_without_force(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("precious")
    assert "--force" in refusal(lambda: save(TRACE, path), path)
    assert path.read_text() == "precious"
    save(TRACE, path, force=True)
    assert load(path) == TRACE
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_link_is_not_followed_to_be_overwritten(tmp_path: Path) -> None:
    target, link, dangling = tmp_path / "target", tmp_path / "link", tmp_path / "dangling"
    target.write_text("precious")
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "nowhere")
    for path in (link, dangling):
        refusal(lambda path=path: save(TRACE, path), path)  # type: ignore[misc]
    assert target.read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


def test_unwritable_paths(tmp_path: Path) -> None:
    nowhere, folder = tmp_path / "no" / "where.json", tmp_path / "folder"
    folder.mkdir()
    plain = tmp_path / "plain"
    plain.write_text("x")
    for force in (False, True):
        assert "cannot write there" in refusal(lambda: save(TRACE, nowhere, force), nowhere)  # noqa: B023
        refusal(lambda: save(TRACE, folder, force), folder)  # noqa: B023
        refusal(lambda: save(TRACE, plain / "a", force), plain / "a")  # noqa: B023
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "plain"]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("force", [False, True])
def test_no_file_takes_the_place_of_a_device_or_pipe(force: bool, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "is a device or pipe" in refusal(lambda: save(TRACE, pipe, force), pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("force", [False, True])
def test_names_as_long_as_the_file_system_allows(force: bool, tmp_path: Path) -> None:
    longest = os.pathconf(tmp_path, "PC_NAME_MAX")
    for name in ("x" * 250, "x" * longest, "é" * (longest // 2)):
        save(TRACE, tmp_path / name, force)
        assert load(tmp_path / name) == TRACE
    with pytest.raises(FileError, match="File name too long"):
        save(TRACE, tmp_path / ("x" * (longest + 1)), force)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("step", ["fsync", "replace", "link"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failing_write_leaves_the_old_file(
    step: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    path = tmp_path / "trace.json"
    force = step != "link"
    if force:
        path.write_text("old")
    where: object = Path if step == "replace" else os
    monkeypatch.setattr(where, step, fail)
    with pytest.raises(FileError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        save(TRACE, path, force)
    if isinstance(error, OSError):
        assert str(caught.value) == f"{path}: cannot be written (No space left on device)"
    assert [entry.name for entry in tmp_path.iterdir()] == (["trace.json"] if force else [])
    assert not force or path.read_text() == "old"


def test_what_is_there_is_always_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the instant of the switch the old file is whole, and the new one is already on the disk."""
    path = tmp_path / "trace.json"
    path.write_text("old")
    seen: list[str] = []
    really = Path.replace

    def watch(self: Path, target: Path) -> Path:
        seen.extend([target.read_text(), self.read_text()])
        assert self.parent == target.parent  # a rename is atomic only within one file system
        return really(self, target)

    monkeypatch.setattr(Path, "replace", watch)
    save(TRACE, path, force=True)
    assert seen == ["old", dumps(TRACE)]


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077, 0o000])
def test_permissions_follow_the_umask(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        save(TRACE, tmp_path / "new.json")
        (tmp_path / "old.json").write_text("")
        save(TRACE, tmp_path / "old.json", force=True)
        assert os.umask(mask) == mask  # and leave it as it was
    finally:
        os.umask(before)
    for name in ("new.json", "old.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~mask


def test_write_bytes_keeps_the_same_promises(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    files.write_bytes(b"\x00\xff", path)
    assert path.read_bytes() == b"\x00\xff"
    assert "already there" in refusal(lambda: files.write_bytes(b"", path), path)
    files.write_text("é", path, force=True)
    assert path.read_text(encoding="utf-8") == "é"
