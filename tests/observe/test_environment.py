"""What the environment says about the network of this process."""

from anabranch.observe.environment import NETWORK_NOTE, network_note


def test_the_note_of_the_launcher_is_returned_as_it_is() -> None:
    note = "emulated: 4 hosts, 10 Gbit/s, 50 µs (delays, not a real network)"
    assert network_note({NETWORK_NOTE: note}) == note


def test_without_a_note_there_is_none() -> None:
    assert network_note({}) is None
    assert network_note({NETWORK_NOTE: ""}) is None
