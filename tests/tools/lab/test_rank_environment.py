"""The environment of ranks: torchrun's variables, and those that make backends use the links."""

import os

import pytest

from anabranch.tools.lab.cluster import Cluster
from anabranch.tools.lab.hosts import Host, local_hosts
from anabranch.tools.lab.inside.install import STARTUP_FOLDER
from anabranch.tools.lab.rank_environment import free_port, gpu_environment, rank_environment, shared_gpu_environment

HOSTS = [Host(index, f"10.0.0.{index + 1}", "eth0") for index in range(4)]


def test_one_rank_per_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("FROM_OUTSIDE", "kept")
    found = rank_environment(Cluster([1e10] * 4), HOSTS[2], 0, HOSTS[0], 29500, "abc")
    expected = {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_HOSTID": "lab2",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "ANABRANCH_LAB": "4 hosts, 10 Gbit/s links, network namespaces",
        "ANABRANCH_LAB_ID": "abc",
        "FROM_OUTSIDE": "kept",
    }
    assert expected.items() <= found.items()


def test_several_ranks_of_a_host() -> None:
    found = rank_environment(Cluster([1e10] * 4, 2), HOSTS[2], 1, HOSTS[0], 29500, "abc")
    expected = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2"}
    assert expected.items() <= found.items()


def test_links_inside_a_host_that_are_memory_are_put_into_torch_as_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    found = rank_environment(Cluster([1e10] * 4, 2, "nccl", inside="memory"), HOSTS[2], 1, HOSTS[0], 29500, "abc")
    assert found["ANABRANCH_LAB_INSIDE"] == "memory"
    assert found["PYTHONPATH"] == f"{STARTUP_FOLDER}{os.pathsep}mine"
    assert "ANABRANCH_LAB_INSIDE" not in rank_environment(Cluster([1e10], 2), HOSTS[0], 0, HOSTS[0], 29500, "abc")


def test_the_user_s_threads_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert rank_environment(Cluster([1e9]), HOSTS[0], 0, HOSTS[0], 1, "abc")["OMP_NUM_THREADS"] == "3"


def test_the_plan_cache_is_off_unless_the_user_gives_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANABRANCH_CACHE")
    assert rank_environment(Cluster([1e9]), HOSTS[0], 0, HOSTS[0], 1, "abc")["ANABRANCH_CACHE"] == "off"
    monkeypatch.setenv("ANABRANCH_CACHE", "/plans")
    assert rank_environment(Cluster([1e9]), HOSTS[0], 0, HOSTS[0], 1, "abc")["ANABRANCH_CACHE"] == "/plans"


def test_emulation_says_so() -> None:
    (host,) = local_hosts(1)
    found = rank_environment(Cluster([1e9], alpha_s=1e-4), host, 0, host, free_port(), "abc")
    assert found["ANABRANCH_LAB"].endswith("emulated")
    assert '"rate_bit_s": 1000000000.0' in found["ANABRANCH_EMULATED"]
    assert found["ANABRANCH_NETWORK_NOTE"] == "emulated: 1 host, 1 Gbit/s, 100 µs (delays, not a real network)"


def test_real_links_have_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANABRANCH_NETWORK_NOTE", raising=False)
    assert "ANABRANCH_NETWORK_NOTE" not in rank_environment(Cluster([1e9]), HOSTS[0], 0, HOSTS[0], 29500, "x")


@pytest.mark.parametrize(
    ("ranks_per_host", "gpus", "expected"),
    [
        (1, [], [None] * 4),
        (1, ["a"], [None] * 4),
        (1, ["a", "b"], ["a", "b", "a", "b"]),
        (2, ["a", "b"], ["a,b"] * 4),
        (2, ["a", "b", "c", "d"], ["a,b", "c,d", "a,b", "c,d"]),
        (2, ["a", "b", "c"], ["a,b", "c,a", "b,c", "a,b"]),
        (2, ["a"], [None] * 4),
        (3, ["a", "b"], ["a", "b", "a", "b"]),
    ],
)
def test_gpus_are_dealt_out_in_turn(ranks_per_host: int, gpus: list[str], expected: list[str | None]) -> None:
    cluster = Cluster([1e9] * 4, ranks_per_host, "nccl")
    dealt = [gpu_environment(cluster, host, 0, gpus).get("CUDA_VISIBLE_DEVICES") for host in HOSTS]
    assert dealt == expected


def test_a_gpu_that_the_user_chose_by_number_is_given_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert gpu_environment(Cluster([1e9] * 4), HOSTS[1], 0, ["GPU-c"]) == {"CUDA_VISIBLE_DEVICES": "GPU-c"}
    assert gpu_environment(Cluster([1e9] * 4), HOSTS[1], 0, []) == {}


@pytest.mark.parametrize(("gpus", "expected"), [(["a"], ("lab2-1", "0")), (["a", "b"], (None, None))])
def test_ranks_that_share_a_gpu_look_like_ranks_of_several_hosts(
    gpus: list[str], expected: tuple[str | None, str | None]
) -> None:
    """As NCCL and programs see them, for the second rank of a host."""
    found = gpu_environment(Cluster([1e9] * 4, 2, "nccl"), HOSTS[2], 1, gpus)
    assert (found.get("NCCL_HOSTID"), found.get("LOCAL_RANK")) == expected


@pytest.mark.parametrize(("ranks", "queues"), [(2, "8"), (12, "8"), (16, "6"), (64, "2")])
def test_ranks_on_one_gpu_have_the_queues_of_a_gpu_of_their_own(
    monkeypatch: pytest.MonkeyPatch, ranks: int, queues: str
) -> None:
    """As long as there are enough; a number that the user has chosen is kept."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert shared_gpu_environment(ranks) == {"CUDA_DEVICE_MAX_CONNECTIONS": queues}
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert shared_gpu_environment(ranks) == {}


def test_programs_learn_backend_and_slowest_rate() -> None:
    cluster = Cluster([1e10, 1e9, None])
    told = rank_environment(cluster, HOSTS[0], 0, HOSTS[0], 29500, "x")
    assert told["ANABRANCH_LAB_BACKEND"] == "gloo" and told["ANABRANCH_LAB_BIT_S"] == "1000000000"
    assert rank_environment(Cluster([None]), HOSTS[0], 0, HOSTS[0], 29500, "x")["ANABRANCH_LAB_BIT_S"] == "0"


def test_what_another_torchrun_has_said_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert "TORCHELASTIC_USE_AGENT_STORE" not in rank_environment(Cluster([1e9]), HOSTS[0], 0, HOSTS[0], 29500, "x")
