"""Hosts on a switch: network namespaces, a bridge, and a shaped link from each to it, all over netlink."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from anabranch.errors import LabError
from anabranch.lab.namespaces import Namespace, create, inside

INTERFACE = "eth0"
PREFIX_BITS = 24
LOOPBACK = 1  # its index in every namespace
# After a pause a link lets a bucketful pass at once, so a bucket should be small; but the kernel hands over 64 KiB at a
# time, and late timers cost rate. 0.8 ms of traffic and two such packets were the least that kept every rate.
BURST_S, LEAST_BURST_NBYTES, MOST_BURST_NBYTES = 0.84e-3, 128 << 10, 1 << 20
LONGEST_WAIT = "50ms"  # of a packet, before the link drops it
LINKS_UP_S, PAUSE_S = 10.0, 0.005


@dataclass(frozen=True)
class Host:
    """One of the lab's machines: where its ranks run, and how the others reach it.

    ``namespace`` is None where the ranks are plain processes of this machine.
    """

    index: int
    address: str
    interface: str
    namespace: Namespace | None = None


def local(count: int) -> list[Host]:
    """Hosts in name only: all of them are this machine."""
    return [Host(index, "127.0.0.1", "lo") for index in range(count)]


@contextmanager
def linked(rates_bit_s: Sequence[float | None]) -> Iterator[list[Host]]:
    """Hosts that can reach each other, host i through a link of ``rates_bit_s[i]`` in both directions.

    Nothing of it is in this process's own namespace, so two labs cannot meet. It vanishes when this context ends or
    this process dies, and each host's own namespace with the last process that was started there.
    """
    with ExitStack() as held:

        def fresh() -> Namespace:
            namespace = create()
            held.callback(namespace.close)
            return namespace

        switch = fresh()
        hosts = [Host(index, _address(index), INTERFACE, fresh()) for index in range(len(rates_bit_s))]
        _plug(switch, hosts, rates_bit_s)
        for host, rate in zip(hosts, rates_bit_s, strict=True):
            _switch_on(host, rate)
        for namespace in [switch, *(host.namespace for host in hosts if host.namespace is not None)]:
            _await_links(namespace)
        yield hosts


def _address(index: int) -> str:
    return f"10.201.0.{index + 1}"


def _plug(switch: Namespace, hosts: Sequence[Host], rates_bit_s: Sequence[float | None]) -> None:
    """A bridge, and a cable from it into every host; what travels to a host is shaped here."""
    from pyroute2 import IPRoute

    with inside(switch), IPRoute() as netlink:  # a socket stays in the namespace it was made in
        netlink.link("add", ifname="switch", kind="bridge")
        (bridge,) = netlink.link_lookup(ifname="switch")
        netlink.link("set", index=bridge, state="up")
        for host, rate in zip(hosts, rates_bit_s, strict=True):
            assert host.namespace is not None
            port = f"host{host.index}"
            far_end = {"ifname": host.interface, "net_ns_fd": host.namespace.descriptor}
            netlink.link("add", ifname=port, kind="veth", peer=far_end)
            (index,) = netlink.link_lookup(ifname=port)
            netlink.link("set", index=index, master=bridge, state="up")
            shape(netlink, index, rate)


def _switch_on(host: Host, rate_bit_s: float | None) -> None:
    """Address and interfaces of one host; what travels from it is shaped here."""
    from pyroute2 import IPRoute

    assert host.namespace is not None
    with inside(host.namespace), IPRoute() as netlink:
        netlink.link("set", index=LOOPBACK, state="up")
        (index,) = netlink.link_lookup(ifname=host.interface)
        netlink.addr("add", index=index, address=host.address, prefixlen=PREFIX_BITS)
        netlink.link("set", index=index, state="up")
        shape(netlink, index, rate_bit_s)


def _await_links(namespace: Namespace) -> None:
    """The kernel opens a link a little after it is told to, and drops packets until then; TCP repeats one after 1 s."""
    from pyroute2 import IPRoute

    deadline = time.monotonic() + LINKS_UP_S
    with inside(namespace), IPRoute() as netlink:
        while any(_closed(link) for link in netlink.get_links()):
            if time.monotonic() > deadline:
                raise LabError(f"the lab's links are not up after {LINKS_UP_S:g} s: try again")
            time.sleep(PAUSE_S)


def _closed(link: Any) -> bool:
    return link.get("linkinfo", {}).get("kind") == "veth" and bool(link.get("operstate") != "UP")


def shape(netlink: Any, index: int, rate_bit_s: float | None) -> None:
    """Let the interface send no faster than this; None leaves it alone."""
    if rate_bit_s is not None:
        rate = round(rate_bit_s / 8)
        burst_nbytes = min(max(round(rate * BURST_S), LEAST_BURST_NBYTES), MOST_BURST_NBYTES)
        netlink.tc("add", "tbf", index, rate=rate, burst=burst_nbytes, latency=LONGEST_WAIT)
