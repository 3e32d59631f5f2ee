"""Lanes: process groups that each carry one message at a time, in the order in which they were given.

On a CPU group a lane is a thread that waits; on NCCL it is a stream on which the waiting is ordered. Either way every
collective of a lane is issued from one place in one order, and none from a future's callback: there, Gloo's own threads
would wait for themselves, and ranks would issue in different orders.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.futures import Future

from anabranch.comm.exchange import Group, Steps
from anabranch.errors import CollectiveError, UpdateError
from anabranch.plan import MAX_LANES

HELD_WORKS = 64
# For Gloo's threads to let go of the last tensors: one that does so while Python ends aborts the program.
GRACE_S = 0.05


class Message(NamedTuple):
    """An exchange to run: its steps, the tensor that will hold its result, and its name in errors.

    ``on_end`` gets the works of the exchange: when they are done on a host lane, when they are issued on a stream
    lane. ``on_side_stream``: it computes before it sends; on a stream lane that runs beside the caller's computation.
    """

    steps: Steps
    result: torch.Tensor
    label: str
    on_end: Callable[[list[dist.Work]], None] | None = None
    on_side_stream: bool = False


class Lane(Protocol):
    """Carries one message after another over one process group."""

    group: Group

    def submit(self, message: Message) -> Future[torch.Tensor]:
        """Run a collective behind those already submitted; the future gives its result when it is done."""
        ...

    def close(self, timeout_s: float) -> bool:
        """End the lane; False if it still waits in a collective after that time."""
        ...


class HostLane:
    """A daemon thread that runs collectives to their end. After one has failed it starts no other."""

    def __init__(self, group: Group, name: str, failures: list[CollectiveError]) -> None:
        self.group = group
        self._failures = failures  # of all lanes of this model: after the first, none of them starts anything
        self._queue: queue.SimpleQueue[tuple[Message, Future[torch.Tensor]] | None] = queue.SimpleQueue()
        # Gloo's own threads must not be the last to let go of a work: as the interpreter ends, they would abort it.
        self._held: deque[dist.Work] = deque(maxlen=HELD_WORKS)
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, message: Message) -> Future[torch.Tensor]:
        if self._failures:
            raise self._failures[0]
        done: Future[torch.Tensor] = Future()
        # The reducer cannot read an exception that was set on a future; one that is raised in then() it can.
        shown = done.then(lambda future: future.wait())
        self._queue.put((message, done))
        return shown

    def close(self, timeout_s: float) -> bool:
        self._queue.put(None)
        if self._thread is not threading.current_thread():  # where the garbage collector may have run
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while (job := self._queue.get()) is not None:
            message, done = job
            try:
                self._run(message)
            except BaseException as error:
                done.set_exception(error)  # type: ignore[arg-type]
            else:
                done.set_result(message.result)
            del job, message, done  # while get() blocks, nothing here may keep the last bucket alive

    def _run(self, message: Message) -> None:
        if self._failures:
            raise self._failures[0]
        begun = monotonic()
        works = []
        try:
            for work in message.steps:
                works.append(work)
                self._held.append(work)
                work.wait()
        except Exception as error:
            elsewhere = "Another rank has died, stalled or left this step: look for the first error among all ranks. "
            failure = CollectiveError(
                f"{message.label} did not get through after {monotonic() - begun:.1f} s: {error}. "
                f"{'' if isinstance(error, UpdateError) else elsewhere}Nothing more is sent here"
            )
            self._failures.append(failure)
            raise failure from error
        if message.on_end is not None:
            message.on_end(works)


class StreamLane:
    """A side stream on which collectives are waited for; nothing on the host waits.

    The first step is issued from the caller's stream, so that the communicator has the next message at once: issued
    from the side stream, it would get it only after that stream has seen the last one end. For the same reason
    nothing else is put on the side stream, not even an event: with few hardware queues (under MPS, or
    CUDA_DEVICE_MAX_CONNECTIONS=1) work that waits there can hold up the computation behind it.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group = group
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)

    def submit(self, message: Message) -> Future[torch.Tensor]:
        works = [] if message.on_side_stream else [next(message.steps)]
        if message.on_side_stream:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for work in works:
                work.wait()  # orders the stream; the host goes on
            for work in message.steps:
                works.append(work)
                work.wait()
            if message.on_end is not None:
                message.on_end(works)
            done: Future[torch.Tensor] = Future(devices=[self._device])
            done.set_result(message.result)
        return done

    def close(self, timeout_s: float) -> bool:  # noqa: ARG002
        return True


class Lanes:
    """The lanes of one model, made when they are first needed.

    A host lane issues from its own thread, at no fixed point of the program, so it must have a group to itself: on
    the user's group, a loss that the program all-reduces after backward could meet a bucket. A stream lane issues
    where the program is, and the first one uses the user's group, as DDP does. ``single_cta`` lanes have communicators
    of their own that run on one multiprocessor each: little data needs no more, and NCCL's blocks occupy theirs while
    they wait for the network, so a full all-to-all would take multiprocessors away from backward.
    """

    def __init__(self, group: Group, device: torch.device, single_cta: bool = False) -> None:
        self._main, self._device, self._single_cta = group, device, single_cta
        self._made: list[Group] = []
        self._lanes: list[Lane] = []
        self._failures: list[CollectiveError] = []  # on NCCL failures show in torch's own watchdog instead

    def __len__(self) -> int:
        return len(self._lanes)

    def __getitem__(self, index: int) -> Lane:
        return self._lanes[index]

    @property
    def groups(self) -> Sequence[Group]:
        """The process group of each lane."""
        return [lane.group for lane in self._lanes]

    def check(self) -> None:
        """Raise the error that stopped a lane, if one did."""
        if self._failures:
            raise self._failures[0]

    @property
    def most(self) -> int:
        """How many lanes there can be: a part of the world gets no second NCCL communicator without the other ranks."""
        part = dist.get_world_size(self._main) < dist.get_world_size()
        return 1 if part and self._device.type == "cuda" else MAX_LANES

    def grow(self, count: int) -> None:
        """Have at least ``count`` lanes. Collective: every rank of the group calls it at the same point."""
        if count > self.most:
            raise RuntimeError(f"{count} lanes were asked for and this process group can have {self.most}: use fewer")
        while len(self._lanes) < count:
            number = len(self._lanes)
            if self._device.type == "cuda":
                shared = number == 0 and not (self._single_cta and self.most > 1)
                group = self._main if shared else self._made_group(number)
                self._lanes.append(StreamLane(group, self._device))
            else:
                self._lanes.append(HostLane(self._made_group(number), f"anabranch-lane-{number}", self._failures))

    def close(self, timeout_s: float = 5.0) -> None:
        """End the threads and destroy the groups that were made here."""
        ended = [lane.close(timeout_s) for lane in self._lanes]
        sleep(GRACE_S)
        made, self._made, self._lanes = self._made, [], []
        for group in made:
            # One whose collective never ended cannot be destroyed without waiting for it; the process's end does that.
            if all(ended) and dist.is_initialized():
                with suppress(ValueError, AssertionError):  # gone already, with the default group
                    dist.destroy_process_group(group)

    def _made_group(self, number: int) -> Group:
        backend = dist.get_backend(self._main)
        single_cta = self._single_cta and self._device.type == "cuda"
        options = _single_cta_options(timeout_of(self._main)) if single_cta else None
        group = same_ranks(self._main, backend, f"anabranch lane {number}", options)
        self._made.append(group)
        return group


def _single_cta_options(timeout: timedelta | None) -> Any:
    """Options of an NCCL communicator that runs on one multiprocessor."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = 1
    if timeout is not None:
        options._timeout = timeout  # torch warns where it differs from the group's
    return options


def same_ranks(group: Group, backend: str, description: str, options: Any = None) -> Group:
    """A new group of the same ranks with the same deadline. Collective among them."""
    everyone = dist.get_world_size(group) == dist.get_world_size()
    made = dist.new_group(
        None if everyone else dist.get_process_group_ranks(group),
        timeout=timeout_of(group),
        backend=backend,
        pg_options=options,
        use_local_synchronization=not everyone,
        group_desc=description,
    )
    if not isinstance(made, dist.ProcessGroup):
        raise RuntimeError(f"rank {dist.get_rank()} is not in the process group that it was to copy for {description}")
    return made


def timeout_of(group: Group) -> timedelta | None:
    """The deadline of a group's collectives, where its backend tells."""
    for kind in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError):
            timeout = group._get_backend(torch.device(kind)).options._timeout
            if isinstance(timeout, timedelta):
                return timeout
    return None
