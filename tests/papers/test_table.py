"""Figures beside each other: ratios, words, and that none of ours is typed in."""

import ast
import json
from pathlib import Path

import benchmarks.papers
import pytest
from benchmarks.papers.table import AGREES, OURS_ALONE, WITHIN, Figure, Reasons, Reproduction, Section, range_text

WORDS = Reasons("less here", "more here")
FILES = sorted(Path(benchmarks.papers.__file__).parent.glob("*.py"))


def test_a_word_follows_from_the_ratio() -> None:
    cases: list[tuple[float | None, float, str, float | None]] = [
        (2.0, 2.0 * (1 + 0.99 * WITHIN), AGREES, 1 + 0.99 * WITHIN),
        (2.0, 2.0 * (1 - 0.99 * WITHIN), AGREES, 1 - 0.99 * WITHIN),
        (2.0, 1.0, "lower: less here", 0.5),
        (2.0, 3.0, "higher: more here", 1.5),
        (None, 3.0, OURS_ALONE, None),
    ]
    for published, ours, word, ratio in cases:
        figure = WORDS.compare("case", "what", "s", published, ours)
        assert (figure.word, figure.ratio) == (word, pytest.approx(ratio) if ratio else None)


def test_what_was_not_computed_has_no_ratio() -> None:
    assert Figure("case", "what", "s", 2.0, None, "not simulated").ratio is None
    assert range_text([2.0, 1.0, 3.0]) == "1.00 to 3.00"


def test_every_figure_of_a_document_says_how_it_came_about() -> None:
    section = Section("title", "source", "counted", (WORDS.compare("case", "what", "s", 2.0, 1.0),), ("note",))
    document = json.loads(json.dumps(Reproduction("paper", (section,)).document()))
    (row,) = document["sections"][0]["figures"]
    assert (row["ratio"], row["how"], row["published"], row["ours"]) == (0.5, "counted", 2.0, 1.0)


def typed_in(tree: ast.AST) -> list[int]:
    """Lines in which a figure of ours is a number in the source: the fifth argument of Figure and of compare.

    A float anywhere in it, or a number and nothing that was computed.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("Figure", "compare"):
            given = [*node.args[4:5], *(keyword.value for keyword in node.keywords if keyword.arg == "ours")]
            parts = [part for value in given for part in ast.walk(value)]
            values = [part.value for part in parts if isinstance(part, ast.Constant) and part.value is not None]
            bare = values and not any(isinstance(part, ast.Name) for part in parts)
            if bare or any(isinstance(value, float) for value in values):
                found.append(node.lineno)
    return found


def test_the_checker_sees_a_figure_that_is_typed_in() -> None:
    assert typed_in(ast.parse("Figure('', '', '', 1.0, 2.5, '')")) == [1]
    assert typed_in(ast.parse("words.compare('', '', '', 1.0, ours=-2.5)")) == [1]
    assert typed_in(ast.parse("words.compare('', '', '', 1.0, 7)\nFigure('', '', '', 1.0, 2 * 3, '')")) == [1, 2]
    assert typed_in(ast.parse("Figure('', '', '', 1.0, 100 * saved, '')")) == []
    assert typed_in(ast.parse("Figure('', '', '', 1.0, None, '')\nwords.compare('', '', '', 1.0, ours['x'])")) == []


def test_no_figure_of_ours_is_typed_in() -> None:
    for path in FILES:
        assert typed_in(ast.parse(path.read_text(encoding="utf-8"))) == [], path
