"""Hosts on a switch: network namespaces, a bridge, and a shaped link from each host to it, created over netlink.

Namespaces are anonymous: created, entered and held by file descriptors, so that none outlives its users.
"""

import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.values.errors import LabError

CLONE_NEWNET = 0x40000000
CURRENT = Path("/proc/thread-self/ns/net")
INTERFACE = "eth0"
PREFIX_BITS = 24
LOOPBACK = 1  # its index in every namespace
# tbf is a token bucket: after a pause a whole bucket passes at once, so it should be small. But the kernel sends 64 KiB
# at a time, and late timers cost rate. 0.8 ms of traffic, and two such packets, were the smallest that kept every rate.
BURST_S = 0.84e-3
MIN_BURST_NBYTES = 128 << 10
MAX_BURST_NBYTES = 1 << 20
MAX_QUEUEING = "50ms"  # of a packet, before the link drops it
LINKS_UP_S = 10.0
PAUSE_S = 0.005


def new_namespace() -> int:
    """A descriptor of a new, empty network namespace, which the calling thread does not enter; OSError if not allowed.

    The namespace, and everything in it, exists as long as the descriptor is open or any process runs in it.
    """
    with CURRENT.open() as home:
        _call("unshare", CLONE_NEWNET)
        try:
            return os.open(CURRENT, os.O_RDONLY)
        finally:
            enter(home.fileno())


@contextmanager
def inside(namespace: int) -> Iterator[None]:
    """A context in which the calling thread, and every socket and process that it creates, is in ``namespace``."""
    with CURRENT.open() as home:
        enter(namespace)
        try:
            yield
        finally:
            enter(home.fileno())


def enter(namespace: int) -> None:
    """Move the calling thread into a network namespace."""
    _call("setns", namespace, CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    # os.unshare and os.setns came with Python 3.12.
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


@contextmanager
def netlink_in(namespace: int) -> Iterator[Any]:
    """A netlink socket of this namespace, to configure its interfaces; the kernel's refusals become OSErrors."""
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        with inside(namespace), IPRoute() as netlink:
            yield netlink
    except NetlinkError as error:
        raise OSError(error.code, str(error)) from error


@dataclass(frozen=True)
class Host:
    """One of the lab's machines: the namespace of its ranks, and the address and interface to reach it.

    ``namespace`` is a descriptor; None where the ranks are plain processes of this machine.
    """

    index: int
    address: str
    interface: str
    namespace: int | None = None


def local_hosts(count: int) -> list[Host]:
    """Hosts without namespaces: all of them are this machine."""
    return [Host(index, "127.0.0.1", "lo") for index in range(count)]


@contextmanager
def linked_hosts(rates_bit_s: Sequence[float | None]) -> Iterator[list[Host]]:
    """Hosts that can reach each other, host i through a link of ``rates_bit_s[i]`` in both directions.

    Nothing is created in this process's own namespace, so two labs never interfere. The kernel removes everything when
    this context ends or this process dies; a host's namespace stays until the last process in it has ended.
    """
    with ExitStack() as held:
        namespaces = []
        for _ in range(1 + len(rates_bit_s)):
            namespaces.append(new_namespace())
            held.callback(os.close, namespaces[-1])
        switch, *others = namespaces
        hosts = [Host(index, f"10.201.0.{index + 1}", INTERFACE, namespace) for index, namespace in enumerate(others)]
        _connect_to_switch(switch, others, rates_bit_s)
        for host, namespace, rate in zip(hosts, others, rates_bit_s, strict=True):
            _configure_host(host, namespace, rate)
        for namespace in namespaces:
            _await_links(namespace)
        yield hosts


def _connect_to_switch(switch: int, hosts: Sequence[int], rates_bit_s: Sequence[float | None]) -> None:
    """Create a bridge and a veth pair from it to every host; traffic to a host is shaped here."""
    with netlink_in(switch) as netlink:
        netlink.link("add", ifname="switch", kind="bridge")
        (bridge,) = netlink.link_lookup(ifname="switch")
        netlink.link("set", index=bridge, state="up")
        for number, (host, rate) in enumerate(zip(hosts, rates_bit_s, strict=True)):
            port = f"host{number}"
            netlink.link("add", ifname=port, kind="veth", peer={"ifname": INTERFACE, "net_ns_fd": host})
            (index,) = netlink.link_lookup(ifname=port)
            netlink.link("set", index=index, master=bridge, state="up")
            shape(netlink, index, rate)


def _configure_host(host: Host, namespace: int, rate_bit_s: float | None) -> None:
    """Give one host its address and switch its interfaces on; traffic from it is shaped here."""
    with netlink_in(namespace) as netlink:
        netlink.link("set", index=LOOPBACK, state="up")
        (index,) = netlink.link_lookup(ifname=host.interface)
        netlink.addr("add", index=index, address=host.address, prefixlen=PREFIX_BITS)
        netlink.link("set", index=index, state="up")
        shape(netlink, index, rate_bit_s)


def _await_links(namespace: int) -> None:
    """Wait until all links are up. Until then the kernel drops packets, and TCP repeats one only after 1 s."""
    deadline = time.monotonic() + LINKS_UP_S
    with netlink_in(namespace) as netlink:
        while any(_is_down(link) for link in netlink.get_links()):
            if time.monotonic() > deadline:
                raise LabError(f"the lab's links are not up after {LINKS_UP_S:g} s: try again")
            time.sleep(PAUSE_S)


def _is_down(link: Any) -> bool:
    return link.get("linkinfo", {}).get("kind") == "veth" and bool(link.get("operstate") != "UP")


def shape(netlink: Any, index: int, rate_bit_s: float | None) -> None:
    """Limit the rate at which an interface sends; None sets no limit."""
    if rate_bit_s is not None:
        rate = round(rate_bit_s / 8)
        burst_nbytes = min(max(round(rate * BURST_S), MIN_BURST_NBYTES), MAX_BURST_NBYTES)
        netlink.tc("add", "tbf", index, rate=rate, burst=burst_nbytes, latency=MAX_QUEUEING)
