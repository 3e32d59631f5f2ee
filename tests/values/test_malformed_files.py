"""Malformed, truncated, damaged and hostile files: one clear error each, ours, on one short line."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anabranch import FileError, TensorSpec, save
from anabranch.values import files
from anabranch.values.files import Noun, dumps, loads
from samples import EXAMPLES, IDS, TRACE, document
from shorthand import trace_of


def reason(text: bytes | str, where: str = "some/file.json") -> str:
    """The one error that a bad text gives: ours, with the file's name, on one short line."""
    with pytest.raises(FileError) as caught:
        loads(text.encode() if isinstance(text, str) else text, where)
    message = str(caught.value)
    assert message.startswith(f"{where}: ")
    assert message.isprintable()  # no newline, no control character
    assert len(message) < 400
    return message


def changed(path: str, value: object, noun: Noun = TRACE) -> str:
    """The file of a noun with one place of it set to another value."""
    whole = document(noun)
    *way, last = [int(step) if step.isdigit() else step for step in path.split("/")]
    at = whole
    for step in way:
        at = at[step]
    at[last] = value
    return json.dumps(whole)


# ---------------------------------------------------------------------------------------------- malformed files


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        ("nonsense", "not valid JSON"),
        ("{}{}", "not valid JSON"),
        ("[]", "holds a list"),
        ("3", "holds a int"),
        ("null", "holds a NoneType"),
        ("{}", "'format' is missing"),
        ('{"format": "pickle"}', "'format' is 'pickle', expected one of trace, network, plan, timeline"),
        ('{"format": ["trace"]}', "'format' is"),
        ('{"format": {"a": 1}}', "'format' is"),
        ('{"format": "trace"}', "'version' is missing"),
        ('{"format": "trace", "version": 2}', "'version' is 2, this program reads version 1"),
        ('{"format": "trace", "version": "1"}', "'version' is '1'"),
        ('{"format": "trace", "version": true}', "'version' is True"),
        ('{"format": "trace", "version": 0}', "'version' is 0"),
        ('{"format": "trace", "version": 1}', "tensors: "),
        ('{"format": "trace", "version": 1, "version": 1}', "'version' is there twice"),
        (
            '{"format": "plan", "version": 1, "buckets": [{"names": ["a"], "lane": 0, "lane": 1}]}',
            "'lane' is there twice",
        ),
        (b"\xff\xfe", "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        ("\0", "not valid JSON"),
        ('{"format": "trace", "version": 1, "forward_s": NaN}', "NaN is not a JSON number"),
        ('{"format": "trace", "version": 1, "forward_s": -Infinity}', "-Infinity is not a JSON number"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("9" * 5000, "not valid JSON"),
    ],
)
def test_not_one_of_our_files(text: str | bytes, words: str) -> None:
    assert words in reason(text)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("surprise", 1, "surprise: Unexpected"),
        ("tensors/0/surprise", 1, "tensors.0.surprise: Unexpected"),
        ("tensors/0/numel", "12", "tensors.0.numel: Input should be a valid integer, found '12'"),
        ("tensors/0/numel", True, "tensors.0.numel: Input should be a valid integer, found True"),
        ("tensors/0/numel", 1.0, "tensors.0.numel: "),
        ("tensors/0/numel", 1.5, "tensors.0.numel: "),
        ("tensors/0/numel", None, "tensors.0.numel: "),
        ("tensors/0/numel", -1, "tensors.0: "),
        ("tensors/0/numel", 1 << 60, "tensors.0: "),
        ("tensors/0/itemsize", 0, "tensors.0: "),
        ("tensors/0/name", 3, "tensors.0.name: "),
        ("tensors/0/name", "", "tensors.0: "),
        ("tensors/0/name", "b", "b is in the trace twice"),
        ("tensors/0/ready_s", "0.5", "tensors.0.ready_s: Input should be a valid number"),
        ("tensors/0/ready_s", True, "tensors.0.ready_s: "),
        ("tensors/0/ready_s", -0.5, "tensors.0: "),
        ("tensors/0/ready_s", 0.8, "list the tensors in ready order"),
        ("tensors/0", [], "tensors.0: "),
        ("tensors", [], "a trace has no tensors"),
        ("tensors", {"0": 1}, "tensors: "),
        ("tensors", "a", "tensors: "),
        ("meta", [], "meta: "),
        ("meta/host", [1], "meta.host"),
        ("meta/host", {"a": 1}, "meta.host"),
        ("forward_s", 10**400, "forward_s: "),
        ("forward_s", 10**300, "forward_s"),
        ("forward_s", None, "forward_s: "),
    ],
)
def test_one_wrong_field_of_a_trace(path: str, value: object, words: str) -> None:
    assert words in reason(changed(path, value))


@pytest.mark.parametrize(
    ("noun", "path", "value", "words"),
    [
        (1, "world_size", 0, "world_size"),
        (1, "world_size", "4", "world_size"),
        (1, "curves", {}, "dense"),
        (1, "curves/dense/points", [], "no points"),
        (1, "curves/dense/points/0/seconds", 9.0, "falls"),
        (1, "curves/dense/points/0/nbytes", 8, "rising sizes"),
        (1, "curves/dense/tail_s_per_byte", -1.0, "tail_s_per_byte"),
        (1, "contention/slowdowns", [2.0], "slowdowns"),
        (1, "contention/link_cap", 0.5, "link_cap"),
        (3, "buckets", [], "no buckets"),
        (3, "buckets/0/names", [], "no names"),
        (3, "buckets/0/names", "a", "names"),
        (3, "buckets/0/names/0", "b", "b is in 2 places"),
        (3, "buckets/0/lane", 64, "lane 64"),
        (3, "buckets/0/lane", -1, "lane -1"),
        (3, "buckets/0/lane", True, "lane"),
        (3, "buckets/0/collective", "", "collective"),
        (4, "spans", [], "compute"),
        (4, "spans/0/start_s", 9.0, "start"),
        (4, "spans/0/track", 0, "track"),
    ],
)
def test_one_wrong_field_elsewhere(noun: int, path: str, value: object, words: str) -> None:
    assert words in reason(changed(path, value, EXAMPLES[noun]))


@pytest.mark.parametrize(("path", "value"), [("ranks_per_node", 0), ("surprise", 1), ("inside/alpha_s", "1")])
def test_one_wrong_field_of_a_two_level_model(path: str, value: object) -> None:
    _, at, found = reason(changed(f"model/{path}", value, EXAMPLES[2])).split(": ", 2)
    assert "AlphaBeta" not in at or path.startswith("inside")
    assert path.rpartition("/")[2] in at + found.partition(", found")[0]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("field", ['"forward_s": 0.25', '"ready_s": 0.5', '"host": "x"', '"numel": 12'])
def test_numbers_that_are_none(number: str, field: str) -> None:
    text = dumps(TRACE)
    assert field in text
    reason(text.replace(field, f"{field.partition(':')[0]}: {number}"))


@pytest.mark.timeout(180)  # for half a second of work, or many minutes if each field were compared with each other one
def test_a_field_twice_among_very_many() -> None:
    fields = ",".join(f'"{i}":1' for i in range(300_000))
    assert "'299999' is there twice" in reason(f'{{"format":"trace","version":1,"meta":{{{fields},"299999":2}}}}')


@pytest.mark.parametrize("noun", EXAMPLES, ids=IDS)
def test_truncated_anywhere(noun: Noun) -> None:
    text = json.dumps(document(noun)).encode()
    assert loads(text, "here") == noun
    for end in range(len(text)):
        reason(text[:end])


@pytest.mark.parametrize("noun", EXAMPLES, ids=IDS)
def test_any_field_missing(noun: Noun) -> None:
    whole = document(noun)
    for field in whole:
        text = json.dumps({key: value for key, value in whole.items() if key != field})
        try:
            loads(text.encode(), "here")
        except FileError as error:
            assert "here: " in str(error)
        else:
            assert field in ("meta", "contention", "model")  # what has a default


@pytest.mark.parametrize("depth", [10, 100, 180, 200, 250, 500, 900, 950, 980, 990, 995, 1000, 1100])
@pytest.mark.parametrize("brackets", ["[]", '{"a":}'])
def test_nested_to_any_depth(depth: int, brackets: str) -> None:
    nested = brackets[:-1] * depth + "1" + brackets[-1] * depth
    for text in (nested, f'{{"format": "trace", "version": 1, "tensors": {nested}}}',
                 f'{{"format": "network", "version": 1, "model": {nested}}}',
                 f'{{"format": "plan", "version": 1, "x": {nested}}}'):  # fmt: skip
        reason(text)


@given(st.binary(max_size=200))
def test_random_bytes(content: bytes) -> None:
    reason(content)


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_flipped_byte_is_read_or_refused(noun: Noun, data: st.DataObject) -> None:
    content = bytearray(json.dumps(document(noun)).encode())
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0x20, 0xFF))
    try:
        loads(bytes(content), "here")
    except FileError as error:
        assert str(error).startswith("here: ")


def any_json(text: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """JSON of any shape that often uses our own field names."""
    ours = [
        "format",
        "version",
        "tensors",
        "forward_s",
        "meta",
        "buckets",
        "names",
        "lane",
        "curves",
        "dense",
        "points",
    ]
    keys = st.one_of(st.sampled_from(ours), text)
    leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), text, st.sampled_from(list(files.KINDS)))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
        max_leaves=8,
    )


def read_or_refused(content: Any) -> None:
    text = json.dumps(content)
    try:
        noun = loads(text.encode(), "some/file.json")
    except FileError:
        reason(text)
    else:
        assert loads(dumps(noun).encode(), "again") == noun


GOOD = st.sampled_from(EXAMPLES).map(document)


def damaged(text: st.SearchStrategy[str], documents: st.SearchStrategy[Any] = GOOD) -> st.SearchStrategy[Any]:
    """A good file with one of its places, at any depth, changed to some JSON, or with a field more."""

    @st.composite
    def one(draw: st.DrawFn) -> Any:
        at = whole = draw(documents)
        while True:
            key = draw(st.sampled_from(list(range(len(at)) if isinstance(at, list) else at)))
            if not isinstance(at[key], list | dict) or not at[key] or draw(st.booleans()):
                break
            at = at[key]
        if isinstance(at, dict) and draw(st.booleans()):
            key = draw(text)
        at[key] = draw(any_json(text))
        return whole

    return one()


PRINTABLE = st.text(st.characters(codec="ascii", min_codepoint=0x20, max_codepoint=0x7E), max_size=10)
HOSTILE = st.text(max_size=10)


@given(any_json(PRINTABLE))
@example({"format": "trace", "version": 1, "tensors": [], "forward_s": float("inf")})
def test_random_json(content: Any) -> None:
    read_or_refused(content)


@pytest.mark.slow
@settings(max_examples=300)
@given(damaged(PRINTABLE))
def test_damaged_files(content: Any) -> None:
    read_or_refused(content)


# ---------------------------------------------------------------------------------------------- hostile values

UNESCAPED = "FileError repeats names and keys of the file as they are, of any length and with newlines"


@pytest.mark.slow
@settings(max_examples=300)
@given(damaged(HOSTILE))
def test_damaged_files_with_control_characters(content: Any) -> None:
    read_or_refused(content)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("x\ny", 1),
        ("tensors/0/\x1b[31m", 1),
        ("meta/two\nlines", [1]),
        ("k" * 5000, 1),
        ("tensors/0/numel", 10**4000),
    ],
    ids=["newline", "escape", "newline in meta", "long key", "long number"],
)
def test_hostile_keys_and_numbers(path: str, value: object) -> None:
    reason(changed(path, value))


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[2Jgone", "n" * 5000], ids=["newline", "escape", "long"])
def test_hostile_names(name: str) -> None:
    bad = document()
    bad["tensors"][0] |= {"name": name, "numel": -1}
    reason(json.dumps(bad))


@pytest.mark.parametrize("value", ["two\nlines", "\x1b[2Jgone", "n" * 5000, "\u2028", "\x00"])
@pytest.mark.parametrize("path", ["format", "version", "tensors/0/numel", "forward_s", "tensors"])
def test_hostile_values_are_short_and_escaped(path: str, value: str) -> None:
    reason(changed(path, value))


@pytest.mark.parametrize("name", ["\ud800", "a\udfffb"])
def test_lone_surrogates_are_refused(name: str) -> None:
    reason(changed("tensors/0/name", name))


def test_a_name_that_utf8_cannot_hold_is_refused_before_writing(tmp_path: Path) -> None:
    with pytest.raises(FileError):
        save(trace_of([TensorSpec("\ud800", 1, 4, 0.0)], 0.0), tmp_path / "trace.json")
