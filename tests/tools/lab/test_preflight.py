"""All problems are reported at once, each with a remedy; the lab asks the kernel, not its version number."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.tools.lab import hosts, preflight
from anabranch.tools.lab.cluster import Cluster
from anabranch.values.errors import LabError
from ranks import patience
from tools.lab.lab_process import needs_namespaces

NOBODY = 65534


def missing(cluster: Cluster, gpus: list[str] | None = None) -> str:
    with pytest.raises(LabError, match="cannot run the lab") as caught:
        preflight.check(cluster, gpus or [])
    return str(caught.value)


def refuse(*arguments: object, **options: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


@needs_namespaces
def test_nothing_is_missing_here() -> None:
    preflight.check(Cluster([1e9, None]), [])


def test_without_root_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "new_namespace", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    words = missing(Cluster([1e9]))
    assert "user 1000" in words and "CAP_SYS_ADMIN" in words and "CAP_NET_ADMIN" in words and "--emulate" in words


def test_everything_is_said_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hosts, "new_namespace", refuse)
    monkeypatch.setitem(sys.modules, "pyroute2", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = missing(Cluster([1e9], backend="nccl"))
    for thing in (
        "pip install 'anabranch[lab]'",
        "no permission to create",
        "an NVIDIA GPU",
        "nvidia-cuda-mps-control",
    ):
        assert thing in words


def test_emulation_needs_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "new_namespace", refuse)
    monkeypatch.setitem(sys.modules, "pyroute2", None)
    preflight.check(Cluster([1e9], alpha_s=1e-5), [])


@needs_namespaces
def test_a_kernel_without_the_shaper(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_tbf(netlink: object, index: int, rate_bit_s: float | None) -> None:
        if rate_bit_s is not None:
            raise OSError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(hosts, "shape", without_tbf)
    words = missing(Cluster([None, 1e9]))
    assert "tbf" in words and "No such file" in words and "CAP_NET_ADMIN" not in words
    preflight.check(Cluster([None]), [])


@needs_namespaces
def test_what_the_kernel_refuses_is_an_error_of_the_system() -> None:
    """Such as an interface of a kind that it does not know."""
    with pytest.raises(OSError, match="not supported"), hosts.linked_hosts([None]) as (host,):
        assert host.namespace is not None
        with hosts.netlink_in(host.namespace) as netlink:
            netlink.link("add", ifname="other", kind="no-such-kind")


@needs_namespaces
def test_namespaces_without_the_right_to_make_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_connect_to_switch", refuse)
    words = missing(Cluster([1e9]))
    assert "CAP_NET_ADMIN" in words and "modprobe" not in words


@needs_namespaces
def test_mps_is_needed_where_ranks_share_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    cluster = Cluster([1e9] * 2, backend="nccl")
    assert "nvidia-cuda-mps-control" in missing(cluster, ["GPU-1"])
    preflight.check(cluster, ["GPU-1", "GPU-2"])


def test_the_link_inside_a_host_is_a_note() -> None:
    assert "over its loopback, unshaped" in str(preflight.caveats(Cluster([1e9], ranks_per_host=2)))
    assert "loopback" not in str(preflight.caveats(Cluster([1e9], 2, "nccl", inside="memory")))


def test_few_cores_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert preflight.caveats(Cluster([1e9] * 2)) is None
    assert "3 ranks share 2 CPU cores" in str(preflight.caveats(Cluster([1e9] * 3)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_nobody_is_told_so() -> None:
    """In earnest: a user without rights asks the kernel. Imports come first: the checkout may be closed to nobody."""
    code = (
        "import os; from anabranch.tools.lab import hosts, preflight\n"
        "from anabranch.tools.lab.cluster import Cluster\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "preflight.check(Cluster([1e9]), [])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100 * patience(), check=False
    )
    assert f"this is user {NOBODY}" in done.stderr and "--emulate" in done.stderr
