"""What all commands share: wrapped sentences, and progress on a terminal only."""

import sys

import pytest
from rich.table import Table
from rich.text import Text

from anabranch.tools.cli.output import PIPED_WIDTH, PROSE_WIDTH, progress, show_tables

SENTENCE = "a sentence of some words that goes on " * 20


def test_sentences_are_wrapped_and_tables_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table()
    table.add_column(no_wrap=True)
    table.add_row("x" * 180)
    show_tables(SENTENCE, Text(SENTENCE), SENTENCE, table)
    lines = capsys.readouterr().out.splitlines()
    sentences = [line for line in lines if "sentence" in line]
    assert len(sentences) >= 3 * 7 and max(map(len, sentences)) <= PROSE_WIDTH
    assert " ".join(" ".join(sentences).split()) == " ".join((SENTENCE * 3).split())
    assert any("x" * 180 in line for line in lines) and max(map(len, lines)) <= PIPED_WIDTH


def test_progress_is_for_terminals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with progress() as update:
            for done in (1, 2):
                update("10gbe", done, 2)
        assert ("10gbe" in capsys.readouterr().err) == terminal
