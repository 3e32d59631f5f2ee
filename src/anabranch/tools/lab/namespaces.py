"""Anonymous network namespaces: created, entered and held by file descriptors, so that none outlives its users."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

CLONE_NEWNET = 0x40000000
CURRENT = "/proc/thread-self/ns/net"


@dataclass(frozen=True)
class Namespace:
    """A network namespace; it exists as long as this process holds its descriptor or any process runs in it.

    Its inode identifies it among all namespaces of the machine.
    """

    descriptor: int = field(repr=False)
    inode: int

    def close(self) -> None:
        """Close the descriptor; the kernel removes the namespace, and everything in it, with its last process."""
        os.close(self.descriptor)


def create() -> Namespace:
    """A new, empty network namespace; the calling thread does not enter it. OSError without permission."""
    home = current()
    try:
        _call("unshare", CLONE_NEWNET)
        try:
            return current()
        finally:
            _call("setns", home.descriptor, CLONE_NEWNET)
    finally:
        home.close()


def current() -> Namespace:
    """The namespace of the calling thread."""
    descriptor = os.open(CURRENT, os.O_RDONLY | os.O_CLOEXEC)
    return Namespace(descriptor, os.fstat(descriptor).st_ino)


@contextmanager
def inside(namespace: Namespace) -> Iterator[None]:
    """A context in which the calling thread, and every socket and process that it creates, is in ``namespace``."""
    home = current()
    try:
        _call("setns", namespace.descriptor, CLONE_NEWNET)
        try:
            yield
        finally:
            _call("setns", home.descriptor, CLONE_NEWNET)
    finally:
        home.close()


def _call(name: str, *arguments: int) -> None:
    # os.unshare and os.setns came with Python 3.12.
    if getattr(_libc(), name)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
