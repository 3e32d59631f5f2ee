"""Networks in one line: what they mean, and what is said of those that mean nothing."""

import pytest

from anabranch import AlphaBeta, Network
from anabranch.tools.cli import network_text
from tools.cli.nouns import error_of

MEANING = {
    "ring:ranks=16,alpha=50us,rate=10gbit": Network.ring(16, 50e-6, 8e-10),
    "tree:ranks=8,alpha=1ms,rate=100mbit/s": Network.tree(8, 1e-3, 8e-8),
    "halving_doubling:ranks=4,alpha=2s,rate=10gbit": Network.halving_doubling(4, 2.0, 8e-10),
    "ring: ranks=16, alpha=0, rate=8bit, eta=0.5, link_cap=2": Network.ring(
        16, 0.0, 1.0, eta=0.5, link_cap=2.0
    ),
    "linear:ranks=16,start=0.9ms,s_per_byte=7.4e-10": Network.linear(16, 0.9e-3, 7.4e-10),
    "two_level:ranks=64,per_node=8,alpha=50us,rate=10Gbit,inside_alpha=500ns,inside_rate=8e6kbit":
        Network.two_level(64, 8, AlphaBeta("ring", 5e-7, 1e-9, 0.0), AlphaBeta("ring", 50e-6, 8e-10)),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), MEANING.items(), ids=[text.partition(":")[0] for text in MEANING])
def test_a_description_means_its_constructor(text: str, expected: Network) -> None:
    found = network_text.network(text)
    assert (found.world_size, found.contention) == (expected.world_size, expected.contention)
    for nbytes in (0, 1, 10**6, 10**9):
        assert found.allreduce_s(nbytes) == pytest.approx(expected.allreduce_s(nbytes), rel=1e-12)
    if expected.model is not None:
        assert found.at(128).allreduce_s(10**6) == pytest.approx(expected.at(128).allreduce_s(10**6), rel=1e-12)


def test_every_example_is_right() -> None:
    for text in network_text.EXAMPLES.values():
        assert network_text.network(text).world_size in (16, 64)


WRONG = {
    "ring:": ("part ''", "name=value"),
    "ring:ranks": ("part 'ranks'", "name=value"),
    "ring:ranks=16,alpha=50us": ("rate is missing", "a rate in bit"),
    "ring:ranks=16,alpha=50us,rate=1gbit,beta=1": ("unknown part 'beta'", "only ranks, alpha, rate"),
    "ring:ranks=16,alpha=50,rate=10gbit": ("alpha is '50'", "s, ms, us or ns"),
    "ring:ranks=16,alpha=50xs,rate=10gbit": ("alpha is '50xs'", "s, ms, us or ns"),
    "ring:ranks=16,alpha=-1s,rate=10gbit": ("alpha is '-1s'", "s, ms, us or ns"),
    "ring:ranks=16,alpha=nans,rate=10gbit": ("alpha is 'nans'", "s, ms, us or ns"),
    "ring:ranks=16,alpha=1e999s,rate=10gbit": ("alpha is '1e999s'", "s, ms, us or ns"),
    "ring:ranks=16,alpha=1s,rate=10": ("rate is '10'", "gbit"),
    "ring:ranks=16,alpha=1s,rate=0gbit": ("rate is 0", "at least one bit"),
    "ring:ranks=16,alpha=1s,rate=1e-320gbit": ("rate is ", "at least one bit"),
    "ring:ranks=2.5,alpha=1s,rate=1gbit": ("ranks is 2.5", "whole number"),
    "ring:ranks=0,alpha=1s,rate=1gbit": ("ranks is 0", "whole number"),
    "ring:ranks=1e300,alpha=1s,rate=1gbit": ("ranks is 1e+300", "whole number"),
    "ring:ranks=4,ranks=8,alpha=1s,rate=1gbit": ("part 'ranks=8'", "each name once"),
    "ring:ranks=4,alpha=1s,rate=1gbit,start=3ms": ("unknown part 'start'", "link_cap"),
    "linear:ranks=4,start=1ms": ("s_per_byte is missing", "a number"),
    "two_level:ranks=4,per_node=2,alpha=1s,rate=1gbit": ("inside_alpha is missing", "a time"),
    "ring:ranks=4,alpha=1s,rate=1gbit,link_cap=0.5": ("link_cap is 0.5", "≥ 1"),
}


def test_a_wrong_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for text, words in WRONG.items():
        error = error_of(capsys, "show", text)
        assert all(word in error for word in words)


def test_most_errors_show_a_right_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert network_text.EXAMPLES["tree"] in error_of(capsys, "show", "tree:ranks=x")


def test_what_is_neither_file_nor_description(capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(capsys, "compare", "--trace", "t", "--network", "star:ranks=3")
    assert "t: no such file" in error  # the trace is read first
    with pytest.raises(ValueError, match="kind is 'star'"):
        network_text.network("star:ranks=3")
