"""Cluster: in words, and what it refuses."""

from typing import Any

import pytest

from anabranch.tools.lab.cluster import Cluster


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (Cluster([1e10] * 4), "4 hosts, 10 Gbit/s links, network namespaces"),
        (Cluster([1e8]), "1 host, 100 Mbit/s links, network namespaces"),
        (Cluster([None, None], 2), "2 hosts of 2 ranks, unshaped links, network namespaces"),
        (
            Cluster([1e9] * 2, 4, "nccl", inside="memory"),
            "2 hosts of 4 ranks, 1 Gbit/s links, network namespaces, memory inside hosts",
        ),
        (Cluster([1e10, 1e9]), "2 hosts, links of 10 Gbit/s, 1 Gbit/s, network namespaces"),
        (Cluster([1e11] * 4, alpha_s=5e-5), "4 hosts, 100 Gbit/s links, 50 us latency, emulated"),
    ],
)
def test_in_words(cluster: Cluster, words: str) -> None:
    assert str(cluster) == words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rates_bit_s": []}, "0 hosts: expected 1 to 250"),
        ({"rates_bit_s": [1e9] * 251}, "251 hosts"),
        ({"rates_bit_s": [1e11]}, "100 Gbit/s: expected 1 Mbit/s to 34 Gbit/s"),
        ({"rates_bit_s": [1e9, 1e3]}, "0.001 Mbit/s: expected 1 Mbit/s"),
        ({"rates_bit_s": [1e9], "alpha_s": 0.0, "backend": "nccl"}, "gloo only"),
        ({"rates_bit_s": [1e9], "alpha_s": 0.0, "ranks_per_host": 2}, "one rank, not 2"),
        ({"rates_bit_s": [None], "alpha_s": 0.0}, "needs a rate"),
        (
            {"rates_bit_s": [1e9], "ranks_per_host": 2, "inside": "memory"},
            "are for --backend nccl, .*drop --inside memory",
        ),
        (
            {"rates_bit_s": [1e9], "backend": "nccl", "inside": "memory"},
            "where a host has one rank: give --ranks-per-host 2",
        ),
    ],
)
def test_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Cluster(**options)


def test_counts() -> None:
    cluster = Cluster([1e9, None, 1e9], 2)
    assert (cluster.hosts, cluster.world_size, cluster.emulated) == (3, 6, False)
