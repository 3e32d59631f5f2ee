"""A process group whose Gloo operations end when they would on the emulated network, and not before they really have.

An operation is issued on the real backends at once. Its emulated time begins at that moment too, on this rank's own
clock, and its work is done when both have ended. What that idealises:

* The time of a rank that comes early runs while it waits for the others, so it may go on sooner than it should, by no
  more than the operation's own time. The last rank is exact, and in lockstep it is the one that counts. A receive that
  was posted long before its send is such a case: it costs nothing more when the message comes.
* What this machine's memory carries more slowly than the emulated network takes what it really takes.
* Deadlines are those of the real operation: no emulated delay exceeds one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn
from weakref import finalize

import torch
from torch.distributed import ProcessGroup, Work

from anabranch.alpha_beta import AlphaBeta
from anabranch.lab.emulation.cost import Law, all_reduce, exchange, point_to_point, star, tree
from anabranch.lab.emulation.wire import Wire
from anabranch.lab.emulation.work import Delay, EmulatedWork, Ender, uncompiled

GLOO = ProcessGroup.BackendType.GLOO
# torch 2.13 gave several a second name; a version's C++ may ask for either.
LAWS: Mapping[str, Law] = {
    "allreduce": all_reduce,
    "allreduce_coalesced": all_reduce,
    "allgather": exchange,
    "allgather_coalesced": exchange,
    "_allgather_base": exchange,
    "all_gather_single": exchange,
    "allgather_into_tensor_coalesced": exchange,
    "all_gather_single_coalesced": exchange,
    "reduce_scatter": exchange,
    "_reduce_scatter_base": exchange,
    "reduce_scatter_single": exchange,
    "reduce_scatter_tensor_coalesced": exchange,
    "reduce_scatter_single_coalesced": exchange,
    "alltoall": exchange,
    "alltoall_base": exchange,
    "all_to_all_single": exchange,
    "broadcast": tree,
    "reduce": tree,
    "barrier": tree,
    "gather": star,
    "scatter": star,
    "send": point_to_point,
    "recv": point_to_point,
    "recv_anysource": point_to_point,
}


class Card(NamedTuple):
    """What all groups of a process share: full duplex. Collectives need both directions, a message one."""

    link: AlphaBeta
    out: Wire
    into: Wire

    def wires(self, operation: str) -> Sequence[Wire]:
        """Those that the operation needs."""
        return {"send": (self.out,), "recv": (self.into,), "recv_anysource": (self.into,)}.get(operation, self[1:])


class EmulatedGroup(ProcessGroup):
    """A group with a twin that holds the same backends: what is asked of it is done by the twin, and takes longer.

    Operations that are not in ``LAWS`` reach the backends directly, without delay: those that carry no data.
    """

    card: ClassVar[Card]

    def __init__(self, store: Any, rank: int, size: int) -> None:
        # With a store, which torch's type stubs ask for, its C++ would not see what is overridden here.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._real: Any = ProcessGroup(store, rank, size)
        self._gloo: dict[str, bool] = {}  # by type of device
        self._ender = Ender()
        finalize(self, self._ender.close)

    def _register_backend(self, device: torch.device, kind: Any, backend: Any = None) -> None:
        super()._register_backend(device, kind, backend)
        self._real._register_backend(device, kind, backend)
        self._gloo[device.type] = kind == GLOO

    def _set_default_backend(self, kind: Any) -> None:
        super()._set_default_backend(kind)
        self._real._set_default_backend(kind)

    def get_group_store(self) -> Any:
        """See torch."""
        return self._real.get_group_store()

    def monitored_barrier(self, *args: Any, **options: Any) -> None:
        """See torch. It returns no work, so its emulated time begins when it has really ended."""
        self._real.monitored_barrier(*args, **options)
        self._delay("barrier", []).sit_out()

    def split_group(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: the group that torch would make has no delays."""
        raise NotImplementedError("split_group is not emulated by anabranch lab --emulate: use new_group")

    def merge_remote_group(self, *_: Any, **__: Any) -> NoReturn:
        """Refused, like ``split_group``."""
        raise NotImplementedError("merge_remote_group is not emulated by anabranch lab --emulate: use new_group")

    def _issue(self, operation: str, args: Sequence[Any], options: Mapping[str, Any]) -> Work:
        parts = [list(_tensors(argument)) for argument in (*args, *options.values())]
        devices = {tensor.device for part in parts for tensor in part}
        work: Work = getattr(self._real, operation)(*args, **options)
        # A barrier names no device: it is emulated where nothing but Gloo could carry it.
        if not all(self._gloo.get(kind, False) for kind in {device.type for device in devices} or self._gloo):
            return work
        on_gpu = [device for device in devices if device.type == "cuda"]
        return EmulatedWork(work, self._delay(operation, parts), self._ender, on_gpu)

    def _delay(self, operation: str, parts: Sequence[Sequence[torch.Tensor]]) -> Delay:
        """Starts the operation's emulated time."""
        law, ranks = LAWS[operation], self.size()
        sizes = [size for part in parts if (size := sum(map(_nbytes, part)))]
        nbytes = max(sizes, default=0)  # of inputs and outputs, the one that is the whole
        if law is star:
            nbytes = ranks * min(sizes, default=0)  # which only the root has
        elif law is all_reduce and any(tensor.is_sparse for part in parts for tensor in part):
            law, nbytes = exchange, ranks * nbytes  # Gloo gathers the entries of all ranks
        return Delay(law(self.card.link, ranks, nbytes), self.card.wires(operation))


def emulated_group(link: AlphaBeta) -> type[EmulatedGroup]:
    """The class of a process's groups, which share one card on this kind of link."""
    operations = {name: _operation(name) for name in LAWS if hasattr(ProcessGroup, name)}
    return type("EmulatedProcessGroup", (EmulatedGroup,), {"card": Card(link, Wire(), Wire()), **operations})


def _operation(name: str) -> Callable[..., Work]:
    def operation(self: EmulatedGroup, *args: Any, **options: Any) -> Work:
        return self._issue(name, args, options)

    operation.__name__ = name
    return uncompiled(operation)


def _tensors(argument: object) -> Iterator[torch.Tensor]:
    """Those in an argument: itself, or in lists of any depth."""
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from _tensors(part)


def _nbytes(tensor: torch.Tensor) -> int:
    if tensor.is_sparse:
        return _nbytes(tensor._indices()) + _nbytes(tensor._values())
    return tensor.numel() * tensor.element_size()
