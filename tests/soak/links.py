"""Links that change while a case trains: its ranks are hosts of the lab, in network namespaces of their own."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from anabranch.tools.lab.cluster import Cluster
from anabranch.tools.lab.hosts import Host, linked_hosts, netlink_in
from anabranch.tools.lab.preflight import check
from anabranch.values.errors import LabError
from soak.case import Case
from soak.journal import Event, Journal

RATE_BIT_S, SLOW_BIT_S = 1e9, 5e6

Place = Callable[[int], dict[str, str]]
Meanwhile = Callable[[list[list[Event]]], None]


def problem() -> str:
    """Why the lab cannot run here; empty if it can."""
    try:
        check(Cluster([RATE_BIT_S] * 2), [])
    except LabError as error:
        return str(error)
    return ""


@contextmanager
def changing(case: Case, folder: Path) -> Iterator[tuple[Place, Meanwhile]]:
    """Hosts for the ranks of a case; the victim's link gets slow, or goes down, when the victim reaches the moment."""
    with linked_hosts([RATE_BIT_S] * case.ranks) as hosts:
        changed: list[Event] = []

        def place(rank: int) -> dict[str, str]:
            namespace = hosts[rank].namespace
            assert namespace is not None
            path = f"/proc/{os.getpid()}/fd/{namespace}"
            return {"namespace": path, "interface": hosts[rank].interface}

        def meanwhile(events: list[list[Event]]) -> None:
            due = [event for event in events[case.victim] if event["what"] == "step" and event["step"] >= case.moment]
            if due and not changed:
                changed.append(due[0])
                Journal(folder / f"rank-{case.victim}.jsonl").note("fault", step=due[0]["step"], stage=due[0]["stage"])
                change(hosts[case.victim], down=case.kind.action == "down")

        yield place, meanwhile


def change(host: Host, down: bool) -> None:
    """Make a host's link slow, or take it down."""
    assert host.namespace is not None
    with netlink_in(host.namespace) as netlink:
        (index,) = netlink.link_lookup(ifname=host.interface)
        if down:
            netlink.link("set", index=index, state="down")
        else:
            rate = round(SLOW_BIT_S / 8)
            netlink.tc("change", "tbf", index, rate=rate, burst=128 << 10, latency="50ms")
