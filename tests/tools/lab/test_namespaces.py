"""Namespaces: the thread comes home, and what it made elsewhere stays there."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.tools.lab.hosts import inside, new_namespace
from ranks import patience
from tools.lab.lab_process import descriptors, needs_namespaces

pytestmark = needs_namespaces


def here() -> int:
    return Path("/proc/thread-self/ns/net").stat().st_ino


@pytest.fixture
def elsewhere() -> object:
    namespace = new_namespace()
    yield namespace
    os.close(namespace)


def test_creating_one_leaves_the_thread_where_it_was(elsewhere: int) -> None:
    assert here() != os.fstat(elsewhere).st_ino


def test_inside_and_home_again(elsewhere: int) -> None:
    home = here()
    with inside(elsewhere):
        assert here() == os.fstat(elsewhere).st_ino
        interfaces = [name for _, name in socket.if_nameindex()]
    assert here() == home
    assert "eth0" not in interfaces and "lo" in interfaces


def test_home_again_after_an_error(elsewhere: int) -> None:
    home = here()
    with pytest.raises(RuntimeError, match="oops"), inside(elsewhere):
        raise RuntimeError("oops")
    assert here() == home


def test_a_process_started_inside_is_inside(elsewhere: int) -> None:
    show = [sys.executable, "-c", "import os; print(os.stat('/proc/self/ns/net').st_ino)"]
    with inside(elsewhere):
        child = subprocess.Popen(show, stdout=subprocess.PIPE, text=True)
    assert child.communicate(timeout=60 * patience())[0] == f"{os.fstat(elsewhere).st_ino}\n"


def test_no_descriptor_is_left_behind(elsewhere: int) -> None:
    before = descriptors()
    os.close(new_namespace())
    with inside(elsewhere):
        pass
    assert descriptors() == before


def test_a_namespace_that_is_none_is_an_error_by_name() -> None:
    with Path("/dev/null").open() as file, pytest.raises(OSError, match="setns: "), inside(file.fileno()):
        pass
