"""Options: those that commands share, and what is said instead of those that are retired."""

from typing import Any

import pytest
from typer.main import get_command

from anabranch.tools.cli.main import app
from anabranch.tools.cli.shared_options import RETIRED, check_options
from tools.cli.nouns import error_of

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
WITHOUT_TABLE = {"lab", "run", "report"}  # they print what their programs print, and report writes a page


def options(verb: str) -> set[str]:
    return {name for parameter in COMMANDS[verb].params for name in parameter.opts}


def test_every_command_that_prints_a_table_takes_json() -> None:
    assert {verb for verb in COMMANDS if "--json" not in options(verb)} == WITHOUT_TABLE


def test_every_command_that_writes_a_file_takes_force() -> None:
    writing = {"--output", "--report", "--chrome", "--keep"}
    assert {verb for verb in COMMANDS if options(verb) & writing} == {
        verb for verb in COMMANDS if "--force" in options(verb)
    }


def test_retired_options_are_gone_and_say_what_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, retired in RETIRED.items():
        assert not options(verb) & set(retired)
        for name, instead in retired.items():
            option, _, value = name.partition(" ")
            for words in ([option, value or "1"], [f"{option}={value or 1}"]):
                said = error_of(capsys, verb, *words)
                assert said == f"{name} of anabranch {verb} is retired: {instead}\n"


def test_the_same_option_of_another_command_is_fine() -> None:
    check_options([])
    check_options(["memory", "--batch-size", "4"])
    check_options(["lab", "--rate", "1gbit", "--", "anabranch", "bench"])
