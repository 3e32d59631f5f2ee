"""Hosts: every link has its rate, both ways at once, and nothing of them is seen outside."""

import socket
import threading
import time

import pytest

from anabranch.tools.lab.hosts import Host, inside, linked_hosts, local_hosts
from tools.lab.lab_process import descriptors, needs_namespaces

PORT = 5000
SKIPPED_NBYTES = 1 << 20  # the bucket's first filling, and TCP's start
MBIT = 1e6
TRIES = 10  # reached only where the machine is busy, or by a failure
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


def received_mbit_s(end: socket.socket, nbytes: int) -> float:
    """The rate at which ``nbytes`` come in, after the first; too high if this thread had to wait for a core."""
    got = counted = 0
    began = 0.0
    while got < nbytes:
        got += len(end.recv(1 << 16))
        if not began and got >= SKIPPED_NBYTES:
            began, counted = time.perf_counter(), got
    return (got - counted) * 8 / (time.perf_counter() - began) / MBIT


def rates_mbit_s(one: Host, other: Host, nbytes: int) -> tuple[float, float]:
    """From ``one`` to ``other`` and back, at the same time."""
    here, there = connected(one, other)
    senders = [threading.Thread(target=send, args=(end, nbytes)) for end in (here, there)]
    back: list[float] = []
    reader = threading.Thread(target=lambda: back.append(received_mbit_s(here, nbytes)))
    with here, there:
        for thread in (*senders, reader):
            thread.start()
        forth = received_mbit_s(there, nbytes)
        for thread in (*senders, reader):
            thread.join(20)
    return forth, back[0]


def check_rate(one: Host, other: Host, expected_mbit_s: float) -> None:
    """Both directions within a tenth of it. A busy machine may slow a link down once, but nothing may speed it up."""
    nbytes = round(expected_mbit_s * MBIT / 8 * TRY_S) + SKIPPED_NBYTES
    for _ in range(TRIES):
        began = time.perf_counter()
        rates = rates_mbit_s(one, other, nbytes)
        assert nbytes * 8 / (time.perf_counter() - began) / MBIT < 1.05 * expected_mbit_s
        if 0.9 * expected_mbit_s < min(rates) and max(rates) < 1.05 * expected_mbit_s:  # headers take 0.04
            return
    raise AssertionError(f"{rates} instead of {expected_mbit_s} Mbit/s")


@needs_namespaces
@pytest.mark.parametrize("rate_mbit_s", [50, 200, 1000])
def test_a_link_has_its_rate_in_both_directions_at_once(rate_mbit_s: int) -> None:
    with linked_hosts([rate_mbit_s * MBIT] * 2) as (one, other):
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
        rates: list[float] = []
        readers = [
            threading.Thread(target=lambda end=here: rates.append(received_mbit_s(end, 4 << 20))) for here, _ in pairs
        ]
        for thread in readers:
            thread.start()
        for thread in (*threads, *readers):
            thread.join(20)
        took_s = time.perf_counter() - began
        for pair in pairs:
            for end in pair:
                end.close()
    assert len(rates) == 2
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
def test_an_unshaped_link_is_faster_than_any_of_those() -> None:
    with linked_hosts([None, None]) as (one, other):
        assert any(min(rates_mbit_s(one, other, 32 << 20)) > 1000 for _ in range(TRIES))


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
