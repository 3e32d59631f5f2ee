"""Lanes: each sends one message at a time over its process group, in the order in which messages were submitted.

For CPU tensors a lane is a thread that waits for each collective; on NCCL it is a CUDA stream that waits. Either way
every collective of a lane is issued from one place in one order, and none from a future's callback: there, Gloo's own
threads would wait for themselves, and ranks would issue in different orders.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic, sleep
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.futures import Future

from anabranch.exchange.groups import clone_group, clone_part, destroy_clone, keep_groups, timeout_of
from anabranch.exchange.interface import Group, Steps
from anabranch.values.errors import CollectiveError, UpdateError
from anabranch.values.nodes import Nodes
from anabranch.values.plan import MAX_LANES

MAX_KEPT_WORKS = 64
# Time for Gloo's threads to release the last tensors: a thread that does so while the interpreter ends aborts it.
RELEASE_GRACE_S = 0.05
# Time for lanes to end their last message. A program that ends in the middle of a step waits as long.
CLOSE_S = 3.0


# The stages of a two-level exchange, as errors name them.
STAGES = ("the sum inside the node", "the exchange between nodes", "the gathering inside the node")
BETWEEN = 1  # the stage of a flat exchange, too


class NodeGroups(NamedTuple):
    """The process groups of one lane for the stages of two-level exchanges: inside the node, between nodes, inside.

    The two inside have the same ranks: one stage of a bucket runs at the same time as another stage of the next.
    """

    scatter: Group
    between: Group
    gather: Group


class Message(NamedTuple):
    """An exchange to run: the steps of its stages, one or three, the tensor for its result, and its name in errors.

    on_end           called at the end of each stage with its works, and whether it was the last; when they are done on
                     a host lane, when they are issued on a stream lane
    on_side_stream   the exchange computes before it sends; a stream lane overlaps that with the caller's computation
    """

    stages: Sequence[Steps]
    result: torch.Tensor
    label: str
    on_end: Callable[[list[dist.Work], bool], None] | None = None
    on_side_stream: bool = False


class Lane(Protocol):
    """Sends one message after another over one process group; with ``nodes``, in up to three stages.

    Each stage runs one message at a time, in the order in which they were submitted, while the next one's stage before
    it may run. A message of one stage keeps its place in that order. So ranks cannot wait for each other in a circle.
    """

    group: Group
    nodes: NodeGroups | None

    def submit(self, message: Message) -> Future[torch.Tensor]:
        """Run an exchange after those already submitted; the future holds its result when it is done."""
        ...

    def use_nodes(self, nodes: NodeGroups) -> None:
        """Take messages of three stages from now on."""
        ...

    def close(self, timeout_s: float) -> bool:
        """End the lane; False if it is still inside a collective after that time."""
        ...


class Job(NamedTuple):
    """A message on its way through a host lane."""

    message: Message
    done: Future[torch.Tensor]


class HostStage:
    """A daemon thread that runs one stage of each message, and waits for it. After one has failed it starts no other.

    failures   what went wrong, shared by all lanes of a model: after the first, no lane starts anything. Not as
               exceptions: one that is raised in a backward pass refers to that pass, and by it to DDP's reducer, which
               owns the hook that owns the lanes. Python cannot free such a ring.
    """

    def __init__(self, number: int, name: str, failures: list[str]) -> None:
        self.after: HostStage | None = None  # what messages that are not over pass on to
        self._number = number
        self._taken = self._passed = 0  # messages, as ``is_idle`` needs them
        self._failures = failures
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # Gloo's own threads must not hold the last reference to a work: releasing it as the interpreter ends aborts.
        self._kept_works: deque[dist.Work] = deque(maxlen=MAX_KEPT_WORKS)
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Run this job's stage after those already put."""
        self._taken += 1
        self._queue.put(job)

    @property
    def is_idle(self) -> bool:
        """Whether all messages have passed on; of the first stage of a lane, to which one thread puts them."""
        return self._taken == self._passed

    def close(self, timeout_s: float) -> bool:
        """End the thread; False if it is still inside a collective after that time."""
        self._queue.put(None)
        if self._thread is not threading.current_thread():  # it is, if this thread ran the garbage collector
            self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        if ended:  # a closed model that is still referenced must not hold the group's connections
            self._kept_works.clear()
        return ended

    def _loop(self) -> None:
        while (job := self._queue.get()) is not None:
            message, done = job
            try:
                is_over = self._run(message)
            except BaseException as error:
                done.set_exception(error)  # type: ignore[arg-type]
            else:
                if is_over:
                    done.set_result(message.result)
                else:
                    assert self.after is not None  # a message of three stages is put to a lane that has them
                    self.after.put(job)
            self._passed += 1
            del job, message, done  # so that the last bucket is freed while get() blocks

    def _run(self, message: Message) -> bool:
        """Run this stage of a message; whether it was the last one."""
        if self._failures:
            raise CollectiveError(self._failures[0])
        flat = len(message.stages) == 1
        if flat and self._number != BETWEEN:
            return False
        started_s = monotonic()
        works = []
        try:
            for work in message.stages[0 if flat else self._number]:
                works.append(work)
                self._kept_works.append(work)
                work.wait()
        except Exception as error:
            stage = "" if flat else f": {STAGES[self._number]}"
            other_rank = "Another rank has died, stalled or left this step: look for the first error among all ranks. "
            self._failures.append(
                f"{message.label}{stage} did not get through after {monotonic() - started_s:.1f} s: {error}. "
                f"{'' if isinstance(error, UpdateError) else other_rank}This rank starts no further collective"
            )
            raise CollectiveError(self._failures[-1]) from error
        is_last = flat or self._number == len(STAGES) - 1
        if message.on_end is not None:
            message.on_end(works, is_last)
        return is_last


class HostLane:
    """Threads that run exchanges and wait for them: one, or with nodes one for each stage.

    A message of one stage goes to its thread at once, unless it would overtake one of three.
    """

    def __init__(self, group: Group, name: str, failures: list[str]) -> None:
        self.group = group
        self.nodes: NodeGroups | None = None
        self._name = name
        self._failures = failures
        self._stages = [HostStage(BETWEEN, name, failures)]

    def submit(self, message: Message) -> Future[torch.Tensor]:
        if self._failures:
            raise CollectiveError(self._failures[0])
        done: Future[torch.Tensor] = Future()
        # DDP's reducer cannot read an exception that was set on a future, but it can read one raised in then().
        readable = done.then(lambda future: future.wait())
        first, between = self._stages[0], self._stages[len(self._stages) // 2]
        at_once = len(message.stages) == 1 and first.is_idle
        (between if at_once else first).put(Job(message, done))
        return readable

    def use_nodes(self, nodes: NodeGroups) -> None:
        self.nodes = nodes
        (between,) = self._stages
        scatter, gather = (
            HostStage(number, f"{self._name}-{NodeGroups._fields[number]}", self._failures) for number in (0, 2)
        )
        scatter.after, between.after = between, gather
        self._stages = [scatter, between, gather]

    def close(self, timeout_s: float) -> bool:
        deadline_s = monotonic() + timeout_s
        ended = [stage.close(max(0.0, deadline_s - monotonic())) for stage in self._stages]
        if all(ended):  # a closed model that is still referenced must not hold the groups' connections
            del self.group, self.nodes
        return all(ended)


class StreamLane:
    """Side streams on which exchanges run, or that wait for them; the host never waits.

    An exchange that computes runs on the side stream from its first step to its last (see ``Communicator``). One
    that only sends is issued from the caller's stream and runs on the group's own, so that the communicator can start
    the next message at once; nothing is put on the side stream but the wait for its end, not even an event: with few
    hardware queues (under MPS, or CUDA_DEVICE_MAX_CONNECTIONS=1) work that waits there can delay the computation behind
    it. Without ``own_stream`` whole exchanges run on the caller's stream. With nodes each stage has a stream.
    """

    def __init__(self, group: Group, device: torch.device, own_stream: bool = True) -> None:
        self.group = group
        self.nodes: NodeGroups | None = None
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if own_stream else None
        self._inside: Sequence[torch.cuda.Stream] = ()

    def submit(self, message: Message) -> Future[torch.Tensor]:
        if len(message.stages) > 1:
            return self._submit_stages(message)
        works = []
        (steps,) = message.stages
        if self._stream is not None and message.on_side_stream:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        elif self._stream is not None:
            works.append(next(steps))
        with torch.cuda.stream(self._stream):  # None: the caller's
            for work in works:
                work.wait()  # the stream waits; the host does not
            for work in steps:
                works.append(work)
                work.wait()
            if message.on_end is not None:
                message.on_end(works, True)
            return self._done(message)

    def use_nodes(self, nodes: NodeGroups) -> None:
        self.nodes = nodes
        self._inside = [torch.cuda.Stream(self._device, priority=-1) for _ in range(2)]

    def close(self, timeout_s: float) -> bool:  # noqa: ARG002
        return True

    def _submit_stages(self, message: Message) -> Future[torch.Tensor]:
        assert self._stream is not None  # lanes with nodes have streams of their own
        before = torch.cuda.current_stream(self._device)
        scatter, gather = self._inside
        for stream, steps in zip((scatter, self._stream, gather), message.stages, strict=True):
            stream.wait_stream(before)
            before = stream
            works = []
            with torch.cuda.stream(stream):
                for work in steps:
                    works.append(work)
                    work.wait()
                if message.on_end is not None:
                    message.on_end(works, stream is gather)
        with torch.cuda.stream(gather):
            return self._done(message)

    def _done(self, message: Message) -> Future[torch.Tensor]:
        """A future that is done when the current stream is."""
        done: Future[torch.Tensor] = Future(devices=[self._device])
        done.set_result(message.result)
        return done


class Lanes:
    """The lanes of one model and its control group, created when they are first needed; the user's group is cloned.

    A host lane issues from its own thread, at no fixed point of the program, so it needs a group of its own: on the
    user's group, a loss that the program all-reduces after backward could be paired with a bucket. A stream lane issues
    from the caller's thread, and the first one uses the user's group, as DDP does. With
    ``max_ctas`` lanes have communicators of their own, which run on that many multiprocessors: less data needs fewer,
    and NCCL's blocks occupy theirs while they wait for the network, so a full all-to-all would take multiprocessors
    away from backward. ``siblings``, for a group of only some ranks: as in ``clone_group``. ``own_streams``: as in
    ``StreamLane``.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        max_ctas: int | None = None,
        siblings: Sequence[Sequence[int]] = (),
        own_streams: bool = True,
    ) -> None:
        self._group = group
        self._device = device
        self._max_ctas = max_ctas
        self._siblings = siblings
        self._own_streams = own_streams
        self._own_groups: list[Group] = []
        self._control: Group | None = None
        self._closed = False
        self._lanes: list[Lane] = []
        self._failures: list[str] = []  # empty on NCCL, where torch's own watchdog reports failures

    def __len__(self) -> int:
        return len(self._lanes)

    def __getitem__(self, index: int) -> Lane:
        return self._lanes[index]

    @property
    def control(self) -> Group:
        """A group of the same ranks for small messages in host memory. The first use is collective."""
        if self._closed:
            raise RuntimeError("the lanes of this DataParallel were closed: wrap the module again")
        if self._control is None:
            self._control = clone_group(self._group, "gloo", "anabranch control")
            self._own_groups.append(self._control)
        return self._control

    @property
    def groups(self) -> Sequence[Group]:
        """The process group of each lane."""
        return [lane.group for lane in self._lanes]

    def check(self) -> None:
        """Raise the error that stopped a lane, if one did."""
        if self._failures:
            raise CollectiveError(self._failures[0])

    @property
    def max_lanes(self) -> int:
        """The most lanes there can be: one for an NCCL group of some ranks, unless all others make siblings of it."""
        is_alone = dist.get_world_size(self._group) < dist.get_world_size() and not self._siblings
        return 1 if is_alone and self._device.type == "cuda" else MAX_LANES

    def grow(self, count: int) -> None:
        """Create lanes until there are ``count``. Collective: every rank of the group calls it at the same point."""
        if count > self.max_lanes:
            raise RuntimeError(
                f"{count} lanes were asked for, and this process group can have {self.max_lanes}: use fewer lanes"
            )
        while len(self._lanes) < count:
            number = len(self._lanes)
            if self._device.type == "cuda":
                shared = number == 0 and (self._max_ctas is None or self.max_lanes == 1)
                group = self._group if shared else self._new_group(number)
                self._lanes.append(StreamLane(group, self._device, self._own_streams))
            else:
                self._lanes.append(HostLane(self._new_group(number), f"anabranch-lane-{number}", self._failures))

    def use_nodes(self, nodes: Nodes, numbers: Iterable[int]) -> None:
        """Let these lanes take two-level exchanges. Collective, as ``grow``.

        Not all lanes: NCCL's communicators take memory, and time to set up.
        """
        for number in sorted(numbers):
            if self._lanes[number].nodes is None:
                self._lanes[number].use_nodes(self._new_node_groups(number, nodes))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """End the threads, all within this time, and destroy the groups that were created here."""
        self._closed = True
        deadline_s = monotonic() + timeout_s
        ended = [lane.close(max(0.0, deadline_s - monotonic())) for lane in self._lanes]
        sleep(RELEASE_GRACE_S)
        groups = self._own_groups
        # Drop the references to groups now: their threads cannot end once the interpreter is shutting down.
        self._own_groups = []
        self._control = None
        self._lanes = []
        # A group whose collective has not ended would block until its timeout, now or when the interpreter ends.
        if not all(ended):
            keep_groups(groups)
            return
        for group in groups:
            destroy_clone(group)

    def _new_group(self, number: int) -> Group:
        group = clone_group(
            self._group, self._backend(), f"anabranch lane {number}", self._options(self._max_ctas), self._siblings
        )
        self._own_groups.append(group)
        return group

    def _new_node_groups(self, number: int, nodes: Nodes) -> NodeGroups:
        inside, between = nodes.ranks, nodes.places
        made = []
        for stage, parts in zip(NodeGroups._fields, (inside, between, inside), strict=True):
            options = self._options(self._max_ctas if parts is between else None)  # inside, links are fast
            made.append(clone_part(self._group, self._backend(), f"anabranch lane {number} {stage}", parts, options))
            self._own_groups.append(made[-1])
        return NodeGroups(*made)

    def _backend(self) -> str:
        return dist.get_backend(self._group) if self._device.type == "cuda" else "gloo"

    def _options(self, max_ctas: int | None) -> Any:
        """Options for an NCCL communicator that runs on this many multiprocessors; None: NCCL's own."""
        if self._device.type != "cuda" or max_ctas is None:
            return None
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = max_ctas
        if (timeout := timeout_of(self._group)) is not None:
            options._timeout = timeout  # torch warns if it differs from the group's
        return options
