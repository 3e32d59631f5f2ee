"""One rank's program: join the group, train through the fault, end in the case's way, and write all of it down."""

import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

import anabranch as ab
from parallel.twins import WIDTH
from soak import hostile
from soak.case import HORIZON, TAIL_STEPS, Case
from soak.configurations import CONFIGURATIONS, SHARDED, Configuration
from soak.injector import Injector
from soak.journal import Journal
from soak.mismatches import MODULES, SETTINGS
from soak.sharded import ShardedTraining, two_nodes
from soak.training import Training, nothing

CHECKPOINT_STEPS = 4
CALLERS = {"anabranch": "src/anabranch/", "checkpoint": "torch/distributed/checkpoint/"}  # by a part of their paths
LOOPS, LOOP_STEPS = 6, 100
GARBAGE_ROUNDS = 3  # objects of C++ let go of others only when they are freed themselves


@dataclass(frozen=True)
class Order:
    """What a rank is to do.

    timeout_s   of the process groups
    phase       "" for an ordinary case; of a resumed training "whole", "killed" or "resumed"
    control     train under stock DDP
    namespace   a path of the network namespace to enter, and the name of its interface; empty for none
    """

    case: str
    rank: int
    folder: str
    timeout_s: float
    phase: str = ""
    control: bool = False
    namespace: str = ""
    interface: str = ""


def run(order: Order) -> None:
    """Be that rank; returns, raises or exits as the case says."""
    case, folder = Case.parse(order.case), Path(order.folder)
    journal = Journal(folder / f"rank-{order.rank}.jsonl")
    # As in a program of its own, however the campaign was started.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _stop)
    faulthandler.register(signal.SIGUSR1, (folder / f"stacks-{order.rank}").open("w"), all_threads=True)
    torch.set_num_threads(1)
    os.environ["ANABRANCH_CACHE"] = str(folder / "cache")  # of this case alone
    if order.namespace:
        _enter(order.namespace, order.interface)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous{order.phase}",
        rank=order.rank,
        world_size=case.ranks,
        timeout=timedelta(seconds=order.timeout_s),
    )
    dist.barrier()  # so that the group's own connections do not count as left over
    if case.configuration in SHARDED:
        two_nodes()
    rank = Rank(case, order, journal)
    before = resources()
    journal.note("begun", timeout_s=order.timeout_s)
    try:
        SCENARIOS[case.kind.scenario](rank)
        part = rank.training.part if rank.training is not None else 0
        journal.note("done", digest=rank.digest(), weights=rank.weights(), part=part)
    except BaseException as error:
        if isinstance(error, SystemExit) and not case.kind.signals:
            raise
        found = {"kind": type(error).__name__, "words": str(error), "trace": _where(error), "caller": _caller(error)}
        journal.note("error", **found, **rank.situation())
        if case.ending == "raise":
            raise
    else:
        with suppress(RuntimeError):  # so that no rank leaves while another one still needs its connections
            dist.barrier()
    rank.end(before)


class Rank:
    """The state of one rank's program."""

    def __init__(self, case: Case, order: Order, journal: Journal) -> None:
        self.case = case
        self.order = order
        self.journal = journal
        self.folder = Path(order.folder)
        self.injector = Injector(case, order.rank, journal, order.timeout_s)
        self.training: Training | None = None
        self.companion: Any = None
        self.is_victim = order.rank == case.victim
        self.is_armed = True

    def disarm(self) -> None:
        """Let no fault happen."""
        self.is_armed = False
        self.injector = Injector(self.case, -1, self.journal, self.order.timeout_s)

    def wrap(self, configuration: Configuration) -> Training:
        """Wrap a model: the victim's is another if the fault says so."""
        action = self.case.kind.action if self.case.kind.point == "setup" and self.is_armed else ""
        change: Callable[[nn.Module], None] = nothing
        if action and self.is_victim:
            self.journal.note("fault", step=0, stage="wrapping")
            configuration = SETTINGS[action](configuration) if action in SETTINGS else configuration
            change = MODULES.get(action, nothing)
        if action == "wrapping-order" and not self.is_victim:
            self.companion = ab.DataParallel(nn.Linear(WIDTH, WIDTH))
        made = ShardedTraining if configuration.build == "sharded" else Training
        self.training = made(configuration, self.injector.at, self.order.control, change)
        if action == "wrapping-order" and self.is_victim:
            self.companion = ab.DataParallel(nn.Linear(WIDTH, WIDTH))
        self.training.skips_nonfinite = self.case.kind.action == "poison-skipped"
        self.injector.watch(self.training)
        self.journal.note("wrapped")
        return self.training

    def train(self, training: Training, first: int, count: int) -> None:
        """Train and note every step, with the digest of the weights after it."""
        compares = training.configuration.style != "join"
        for step in training.steps(first, count):
            digest = training.digest() if compares else ""
            self.journal.note("step", step=step, stage=training.stage(), digest=digest, part=training.part)

    def digest(self) -> str:
        """Of the weights at the end; the same on all ranks."""
        return self.training.digest() if self.training is not None else ""

    def weights(self) -> list[float]:
        """At the end."""
        return self.training.weights() if self.training is not None else []

    def situation(self) -> dict[str, Any]:
        """Whose messages may have failed now."""
        if (own := self.training) is None:
            return {}
        return {"in_force": own.in_force(), "ddp_sends_in_backward": own.ddp_sends_in_backward()}

    def end(self, before: dict[str, Any]) -> None:
        """End as the case says; after close() nothing may be left."""
        if self.case.ending == "close":
            if self.training is not None:
                self.training.close()
            if self.companion is not None:
                self.companion.close()
            if self.case.configuration not in SHARDED:  # whose exchanges end when nobody refers to the model
                self._note_resources("closed, referenced", before)
            self.injector.training = self.training = self.companion = None
            self._note_resources("closed, dropped", before)
        if self.case.ending in ("close", "destroy"):
            dist.destroy_process_group()
        self.journal.note("ended")

    def _note_resources(self, what: str, before: dict[str, Any]) -> None:
        more = {name: found - before[name] for name, found in resources().items()}
        self.journal.note(what, **more, threads=anabranch_threads())


# ----------------------------------------------------------------------------------------------------------- scenarios


def train(rank: Rank) -> None:
    """Wrap, and train through the fault to the end."""
    rank.train(rank.wrap(CONFIGURATIONS[rank.case.configuration]), 0, rank.case.steps)


def launched(rank: Rank) -> None:
    """Train until a signal comes, which the campaign sends to the launcher."""
    rank.disarm()
    train(rank)


def resume(rank: Rank) -> None:
    """Train with checkpoints: without a break, until the victim is killed, or on from the last checkpoint."""
    own = CONFIGURATIONS[rank.case.configuration]
    if own.style == "join":
        own = replace(own, style="plain")
    if rank.order.phase != "killed":
        rank.disarm()
    training = rank.wrap(replace(own, given_plan=own.ours.get("profile_steps") != 0))
    save, load = hostile.save_checkpoint, hostile.load_checkpoint
    if rank.case.kind.through_torch:
        save, load = hostile.save_through_torch, hostile.load_through_torch
    first = load(training, rank.folder, rank.order.rank) if rank.order.phase == "resumed" else 0
    rank.journal.note("loaded", step=first)
    steps = rank.case.steps + 2 * CHECKPOINT_STEPS
    for step in training.steps(first, steps - first):
        rank.journal.note("step", step=step, stage=training.stage(), digest=training.digest())
        if rank.order.phase == "killed" and (step + 1) % CHECKPOINT_STEPS == 0:
            save(training, rank.folder, rank.order.rank, step + 1)


def restart(rank: Rank) -> None:
    """Train: without the fault in the start before, "first", or after, "restarted", which share the cache."""
    if rank.order.phase in ("first", "restarted"):
        rank.disarm()
    if rank.order.phase == "first":
        rank.train(rank.wrap(CONFIGURATIONS[rank.case.configuration]), 0, HORIZON + TAIL_STEPS)
    else:
        train(rank)


def hostile_cache(rank: Rank) -> None:
    """Train, damage all that is in the plan cache, and train on with a new wrapper."""
    own = CONFIGURATIONS[rank.case.configuration]
    training = rank.wrap(own)
    rank.train(training, 0, rank.case.steps)
    if not rank.order.control:
        training.model.close()
    dist.barrier()
    if rank.order.rank == 0:
        found = hostile.damage_files(rank.folder / "cache", random.Random(str(rank.case)))
        rank.journal.note("fault", step=training.step, stage="restarting" if found else "nothing was cached")
    dist.barrier()
    rank.train(rank.wrap(own), rank.case.steps, rank.case.steps)


def loop(rank: Rank) -> None:
    """Wrap, train a little and close, or drop, again and again: what is left must not grow."""
    chance = random.Random(str(rank.case))
    for number in range(LOOPS):
        training = rank.wrap(CONFIGURATIONS[rank.case.configuration])
        # Every round has steps of its own: its sums may be in another order than those of the round before.
        rank.train(training, number * LOOP_STEPS, chance.randrange(1, 2 + int(rank.case.moment)))
        if chance.random() < 0.7 and not rank.order.control:
            training.model.close()
        rank.training = rank.injector.training = None
        del training
        dist.barrier()
        found = resources()
        rank.journal.note("round", number=number, **found, threads=anabranch_threads())


def hostile_plan(rank: Rank) -> None:
    """Wrap with a plan in a damaged file."""
    own = CONFIGURATIONS[rank.case.configuration]
    path = hostile.damaged_plan(rank.folder, random.Random(str(rank.case)), rank.order.rank)
    dist.barrier()
    rank.journal.note("fault", step=0, stage="wrapping")
    plan_of = {key: value for key, value in own.ours.items() if key != "plan"}
    rank.train(rank.wrap(replace(own, ours={**plan_of, "plan": str(path)})), 0, TAIL_STEPS)


def hostile_state(rank: Rank) -> None:
    """Load a damaged comm_state_dict(), on one rank or on all."""
    own = replace(CONFIGURATIONS[rank.case.configuration], given_plan=True)
    chance = random.Random(str(rank.case))
    training = rank.wrap(own)
    rank.train(training, 0, 1 + int(rank.case.moment))
    state = training.model.comm_state_dict()
    training.model.close()
    everywhere = chance.random() < 0.5
    damaged = hostile.damaged_state(state, chance)
    rank.journal.note("fault", step=training.step, stage="loading")
    training = rank.wrap(own)
    training.model.load_comm_state_dict(damaged if everywhere or rank.is_victim else state)
    rank.train(training, 1 + int(rank.case.moment), TAIL_STEPS)


def saving(rank: Rank) -> None:
    """The victim is killed while it writes plans over one another; what is there must be whole."""
    training = rank.wrap(replace(CONFIGURATIONS[rank.case.configuration], given_plan=True))
    if rank.is_victim:
        delay_s = random.Random(str(rank.case)).random() * 0.2
        threading.Timer(delay_s, partial(hostile.kill_noted, rank.journal)).start()
        hostile.save_forever(training, rank.folder)
    rank.train(training, 0, rank.case.steps)


SCENARIOS: Mapping[str, Callable[[Rank], None]] = {
    "train": train,
    "links": train,
    "launched": launched,
    "shared cache": train,
    "full disk": train,
    "resume": resume,
    "restart": restart,
    "second start": restart,
    "loop": loop,
    "hostile plan": hostile_plan,
    "hostile state": hostile_state,
    "hostile cache": hostile_cache,
    "saving": saving,
}


# ----------------------------------------------------------------------------------------------------------- resources


def resources() -> dict[str, Any]:
    """How many groups, file descriptors and live tensors this process has, without garbage."""
    for _ in range(GARBAGE_ROUNDS):
        gc.collect()
    tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
    groups = len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0
    return {"groups": groups, "fds": len(list(Path("/proc/self/fd").iterdir())), "tensors": tensors}


def anabranch_threads() -> list[str]:
    """Names of the library's threads that are still alive."""
    return [thread.name for thread in threading.enumerate() if "anabranch" in thread.name]


def _where(error: BaseException) -> str:
    """The innermost place of an error, such as "lanes.py:120 in _run"."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def _caller(error: BaseException) -> str:
    """Whose code is the innermost one of an error: "anabranch", torch's "checkpoint", or neither."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for whose, folder in CALLERS.items():
            if folder in frame.filename:
                return whose
    return ""


def _stop(number: int, _frame: object) -> NoReturn:
    """The program's own handler of SIGTERM."""
    sys.exit(128 + number)


def _enter(namespace: str, interface: str) -> None:
    from anabranch.tools.lab import hosts

    descriptor = os.open(namespace, os.O_RDONLY)
    hosts.enter(descriptor)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
