"""Which network is emulated: the environment of ranks, and its errors."""

import os

import pytest

from anabranch.observe.environment import network_note
from anabranch.tools.lab.emulation.settings import (
    NETWORK_VARIABLE,
    NOTE_VARIABLE,
    EmulatedNetwork,
    environment,
)
from anabranch.tools.lab.inside.install import STARTUP_FOLDER

NOTE = "emulated: 4 hosts, 10 Gbit/s, 50 µs (delays, not a real network)"


def test_the_environment_holds_the_slowest_rate_and_comes_back_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    variables = environment([25e9, 10e9, 25e9, 25e9], 50e-6)
    assert variables["PYTHONPATH"] == f"{STARTUP_FOLDER}{os.pathsep}mine"
    assert EmulatedNetwork.from_environment(variables) == EmulatedNetwork(4, 10e9, 50e-6)
    monkeypatch.delenv("PYTHONPATH")
    assert environment([1e9], 0.0)["PYTHONPATH"] == str(STARTUP_FOLDER)


def test_the_environment_has_a_note_which_the_library_reads() -> None:
    variables = environment([10e9] * 4, 50e-6)
    assert variables[NOTE_VARIABLE] == NOTE and network_note(variables) == NOTE
    assert "1 host, 2.5 Mbit/s, 1000 µs" in EmulatedNetwork(1, 2.5e6, 1e-3).note
    assert "0.9 Mbit/s" in EmulatedNetwork(1, 9e5, 1e-3).note


def test_a_process_without_the_variable_emulates_nothing() -> None:
    assert EmulatedNetwork.from_environment({}) is None


@pytest.mark.parametrize(
    ("rates", "alpha_s", "named"),
    [
        ([1e9, 0.0], 0.0, '"rate_bit_s": 0.0, .* expected .* a rate_bit_s above 0'),
        ([float("nan")], 0.0, '"rate_bit_s": NaN'),
        ([float("inf")], 0.0, '"rate_bit_s": Infinity'),
        ([1e9], -1e-6, '"alpha_s": -1e-06'),
        ([1e9], float("inf"), '"alpha_s": Infinity'),
    ],
)
def test_an_impossible_network_is_refused(rates: list[float], alpha_s: float, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        environment(rates, alpha_s)


BAD_TEXTS = [
    "",
    "10gbit",
    "[]",
    '{"hosts": 4}',
    '{"hosts": 4, "rate_bit_s": 1e9, "alpha_s": "fast"}',
    '{"hosts": 0, "rate_bit_s": 1e9, "alpha_s": 0}',
    '{"hosts": 4, "rate_bit_s": -1, "alpha_s": 0}',
    '{"hosts": 4, "rate_bit_s": 1e9, "alpha_s": NaN}',
    '{"hosts": 4, "rate_bit_s": 1e9, "alpha_s": 0, "colour": "red"}',
]


@pytest.mark.parametrize("text", BAD_TEXTS)
def test_a_bad_variable_gives_one_clear_error(text: str) -> None:
    with pytest.raises(ValueError, match=f"{NETWORK_VARIABLE} is .*Expected a text such as .*or unset") as caught:
        EmulatedNetwork.from_environment({NETWORK_VARIABLE: text})
    assert repr(text) in str(caught.value)
