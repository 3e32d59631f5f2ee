"""Hosts: every link has its rate, both ways at once, and nothing of them is seen outside."""

import socket
import threading
import time

import pytest

from anabranch.tools.lab.hosts import Host, inside, linked_hosts, local_hosts, netlink_in
from tools.lab.lab_process import descriptors, needs_namespaces

PORT = 5000
MORE_NBYTES = 1 << 20  # for the bucket's first filling and TCP's start
MBIT = 1e6
TRY_S = 0.6


def connected(one: Host, other: Host) -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection, one on each host; a socket stays where it was made."""
    assert one.namespace is not None and other.namespace is not None
    with inside(one.namespace), socket.create_server((one.address, PORT)) as listening:
        with inside(other.namespace):
            there = socket.create_connection((one.address, PORT), timeout=10)
        here, _ = listening.accept()
    for end in (here, there):
        end.settimeout(20)
    return here, there


def send(end: socket.socket, nbytes: int) -> None:
    end.sendall(bytes(nbytes))


def receive(end: socket.socket, nbytes: int) -> None:
    while nbytes:
        nbytes -= len(end.recv(min(nbytes, 1 << 16)))


def seconds_both_ways(one: Host, other: Host, nbytes: int) -> float:
    """From the first byte sent to the last one received, of ``nbytes`` each way at the same time."""
    here, there = connected(one, other)
    threads = [
        threading.Thread(target=target, args=(end, nbytes)) for end in (here, there) for target in (send, receive)
    ]
    with here, there:
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return time.perf_counter() - began


def shaped_mbit_s(host: Host) -> float | None:
    """The rate at which the kernel was told to send from this host."""
    assert host.namespace is not None
    with netlink_in(host.namespace) as netlink:
        shapers = [one for one in netlink.get_qdiscs() if one.get_attr("TCA_KIND") == "tbf"]
        if not shapers:
            return None
        (shaper,) = shapers
        return float(shaper.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")["rate"] * 8 / MBIT)


def check_rate(one: Host, other: Host, expected_mbit_s: float) -> None:
    """Neither direction is faster. A busy machine slows a link down, but nothing speeds it up."""
    nbytes = round(expected_mbit_s * MBIT / 8 * TRY_S) + MORE_NBYTES
    assert nbytes * 8 / seconds_both_ways(one, other, nbytes) / MBIT < 1.05 * expected_mbit_s


@needs_namespaces
@pytest.mark.parametrize("rate_mbit_s", [50, 200, 1000])
def test_a_link_has_its_rate_in_both_directions_at_once(rate_mbit_s: int) -> None:
    with linked_hosts([rate_mbit_s * MBIT] * 2) as (one, other):
        assert shaped_mbit_s(one) == shaped_mbit_s(other) == rate_mbit_s
        check_rate(one, other, rate_mbit_s)


@needs_namespaces
def test_the_slower_of_two_links_decides() -> None:
    with linked_hosts([400 * MBIT, 400 * MBIT, 50 * MBIT]) as (one, two, slow):
        check_rate(one, slow, 50)
        check_rate(one, two, 400)


@needs_namespaces
def test_a_link_is_shared_by_all_who_use_it() -> None:
    """Two hosts send to a third: its link, not theirs, is what they have."""
    with linked_hosts([100 * MBIT] * 3) as (target, *sources):
        pairs = [connected(target, source) for source in sources]
        threads = [threading.Thread(target=send, args=(there, 4 << 20)) for _, there in pairs]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        readers = [threading.Thread(target=receive, args=(here, 4 << 20)) for here, _ in pairs]
        for thread in readers:
            thread.start()
        for thread in (*threads, *readers):
            thread.join(20)
        took_s = time.perf_counter() - began
        for pair in pairs:
            for end in pair:
                end.close()
    assert took_s > (8 << 20) * 8 / (100 * MBIT) * 0.9  # 0.67 s; half of that if each had a link's rate


@needs_namespaces
def test_a_message_after_a_pause_is_not_free() -> None:
    """What the bucket lets pass at once is a small part of it."""
    nbytes, took_s = 1 << 20, []
    with linked_hosts([100 * MBIT] * 2) as (one, other):
        here, there = connected(one, other)
        with here, there:
            for _ in range(3):
                time.sleep(0.1)
                sender = threading.Thread(target=send, args=(here, nbytes))
                began = time.perf_counter()
                sender.start()
                left = nbytes
                while left:
                    left -= len(there.recv(1 << 16))
                took_s.append(time.perf_counter() - began)
                sender.join(20)
    assert min(took_s) > 0.85 * nbytes * 8 / (100 * MBIT)


@needs_namespaces
def test_an_unshaped_link_has_no_limit() -> None:
    with linked_hosts([None, 50 * MBIT]) as (one, other):
        assert shaped_mbit_s(one) is None and shaped_mbit_s(other) == 50


@needs_namespaces
def test_two_labs_at_once_do_not_meet() -> None:
    """They have the same addresses and ports, and each connection stays in its own."""
    with linked_hosts([None, None]) as (one, other), linked_hosts([None, None]) as (second_one, second_other):
        assert one.address == second_one.address
        pairs = [connected(one, other), connected(second_one, second_other)]
        for word, (here, there) in zip((b"first", b"second"), pairs, strict=True):
            here.sendall(word)
            here.close()
            assert there.recv(100) == word
            there.close()


@needs_namespaces
def test_the_machine_s_own_network_is_left_alone() -> None:
    before = socket.if_nameindex()
    with linked_hosts([1e9] * 3) as hosts:
        assert socket.if_nameindex() == before
        for host in hosts:
            assert host.namespace is not None
            with inside(host.namespace):
                assert sorted(name for _, name in socket.if_nameindex())[0] == "eth0"
    assert socket.if_nameindex() == before


@needs_namespaces
def test_descriptors_are_given_back() -> None:
    with linked_hosts([1e9]):  # pyroute2 is imported
        pass
    before = descriptors()
    with linked_hosts([1e9] * 3):
        pass
    assert descriptors() == before


def test_local_hosts_are_this_machine() -> None:
    assert [(host.address, host.interface, host.namespace) for host in local_hosts(2)] == [
        ("127.0.0.1", "lo", None)
    ] * 2
