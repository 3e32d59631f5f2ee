"""What each block saves and how long it computes, from steps that are lean themselves; and how fast the link is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from anabranch.activations.blocks import END, REST, Unit, blocks_of
from anabranch.activations.cost_model import Block, HostLink
from anabranch.activations.host_copies import copies_for
from anabranch.activations.host_pool import HostPool
from anabranch.activations.offloader import Offloader
from anabranch.activations.recompute import Last, PatchedModel, Stretch
from anabranch.activations.side_effects import Aside, containers_copied
from anabranch.activations.solver import Action
from anabranch.observe.clock import Clock, clock_for
from anabranch.observe.step_timer import tensors_in

KEEPS = (
    "if it keeps something for later, such as a cache of keys and values, it cannot be recomputed. Switch that off (in "
    "transformers: use_cache=False), or use Activations(mode='keep') or 'offload'"
)
LINK_NBYTES = 64 << 20  # long enough that what it costs to begin does not count
# Gradients as large as the largest activation that are there at once: an operation's own and its input's.
WORK_TENSORS = 2


@dataclass
class BlockProfile:
    """One unit in one step, in all its runs so far."""

    unit: Unit
    spans: list[tuple[object, object]]  # when it began and ended
    inner_nbytes: int
    input_nbytes: int
    saved_output_nbytes: int
    largest_nbytes: int
    recomputes: bool
    shared_nbytes: int = 0
    gradient: object | None = None  # when that of its output was there


class Survey:
    """Measures the units of a live model while it trains, without ever keeping the activations of two of them.

    Every unit is recomputed from an offloaded input. Before that it runs once more, for the clock and the count: what
    autograd wants to save then is counted and let go. Random numbers, statistics and buffers are as without it. Of
    several forwards before a backward, all are counted.
    """

    def __init__(self, model: nn.Module, offloader: Offloader) -> None:
        self.steps = 0  # whose backward is over
        self.last: Last | None = None  # the unit that ran last
        self._clock: Clock = clock_for(offloader.device)
        self._offloader = offloader
        self._sights: dict[str, BlockProfile] = {}
        self._before: tuple[BlockProfile, set[StorageWeakRef]] | None = None  # the unit before, and what it returned
        self._gradients: list[tuple[str, object]] = []
        self._runs: dict[str, int] = {}  # of each unit in this forward
        self._in_backward = False
        self._over: object | None = None
        self._mark_nbytes = 0  # offloaded before this forward, and in its units
        self._rest_nbytes, self._end_nbytes = 0, 0  # saved outside all units, before the end of the last and after
        self._before_nbytes = self._after_nbytes = 0  # the largest, saved before the first unit and after the last
        actions: dict[str, Action] = {unit.name: "recompute+offload" for unit in blocks_of(model)}
        self._treated = PatchedModel(model, {**actions, REST: "offload"}, offloader, self._measured)
        self._handle = model.register_forward_pre_hook(self._begins)
        self._last = model.register_forward_hook(self._ends)

    def __deepcopy__(self, memo: object) -> Self:
        """A copied model, which computes without gradients, is not surveyed."""
        return self

    def undo(self) -> None:
        """Leave the model as it was."""
        self._treated.undo()
        self._handle.remove()
        self._last.remove()

    def blocks(self) -> list[Block]:
        """What was seen in the last step, in the order of forward: first what is outside of all units.

        Of that, what follows the last unit is differentiated first, while everything is there: that is ``END``. It is
        never offloaded: it would be fetched at once.
        """
        self._clock.settle()
        marks = [mark for _, mark in self._gradients] + [self._over]
        took_s: dict[str, float] = {}
        for number, (name, _) in enumerate(self._gradients):
            took_s[name] = took_s.get(name, 0.0) + self._clock.between(marks[number], marks[number + 1])
        before, after = (WORK_TENSORS * nbytes for nbytes in (self._before_nbytes, self._after_nbytes))
        found = [Block(REST, 0.0, 0.0, self._rest_nbytes, 0, recomputes=False, work_nbytes=before)]
        for name, sight in self._sights.items():
            forward_s = sum(self._clock.between(*span) for span in sight.spans)
            found.append(
                Block(
                    name,
                    forward_s,
                    max(took_s.get(name, 0.0) - forward_s, 0.0),  # with the recomputation
                    sight.inner_nbytes,
                    sight.input_nbytes,
                    sight.shared_nbytes,
                    sight.unit.joins and len(sight.spans) == 1,
                    sight.recomputes,
                    WORK_TENSORS * sight.largest_nbytes,
                    runs=len(sight.spans),
                )
            )
        end = Block(END, 0.0, 0.0, self._end_nbytes, 0, recomputes=False, work_nbytes=after, offloads=False)
        return [*found, end]

    def see(self, unit: Unit, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Run a unit for the clock and the count alone; whether it can be recomputed."""
        if not self._sights:
            self._before_nbytes = self._offloader.counts.largest_nbytes
        inputs = {StorageWeakRef(tensor.untyped_storage()): tensor for tensor in tensors_in((args, kwargs))}
        versions = [tensor._version for tensor in inputs.values()]
        counted, aside = Counted(unit), Aside(unit.parts)
        own_args, own_kwargs = containers_copied(args, kwargs)
        devices = [self._offloader.device] if self._offloader.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices),
            aside,
            saved_tensors_hooks(counted.pack, counted.unpack),
        ):
            began = self._clock.mark()
            output = function(*own_args, **own_kwargs)
            ended = self._clock.mark()
        if versions != [tensor._version for tensor in inputs.values()]:
            raise ValueError(
                f"block {unit.name!r} changes its input in place, so it cannot be recomputed from it: expected an "
                "input that stays as it is; make its first operation one that is not in place"
            )
        outputs = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in(output)}
        sight = BlockProfile(
            unit,
            [(began, ended)],
            sum(nbytes for storage, nbytes in counted.nbytes.items() if storage not in inputs),
            sum(tensor.untyped_storage().nbytes() for tensor in inputs.values()),
            sum(nbytes for storage, nbytes in counted.nbytes.items() if storage in outputs and storage not in inputs),
            max((tensor.untyped_storage().nbytes() for tensor in tensors_in(output)), default=0),
            aside.changed is None,
        )
        sight.largest_nbytes = max([sight.largest_nbytes, *counted.nbytes.values()])
        if self._before is not None:
            before, returned = self._before
            if not returned.isdisjoint(inputs):  # what the block before has saved of its output is our input
                sight.shared_nbytes = min(before.saved_output_nbytes, sight.input_nbytes)
                before.inner_nbytes -= sight.shared_nbytes
        if (earlier := self._sights.get(unit.name)) is not None:  # a layer that is used again, or another forward
            sight.spans = [*earlier.spans, *sight.spans]
            sight.recomputes &= earlier.recomputes
            sight.inner_nbytes += earlier.inner_nbytes
            sight.input_nbytes += earlier.input_nbytes
            sight.largest_nbytes = max(sight.largest_nbytes, earlier.largest_nbytes)
        self._sights[unit.name] = sight
        return sight.recomputes

    def seen(self, unit: Unit, output: Any, offloaded_nbytes: int) -> None:
        """The unit has run in earnest."""
        sight = self._sights[unit.name]
        returned = tensors_in(output)
        self._before = (sight, {StorageWeakRef(tensor.untyped_storage()) for tensor in returned})
        self._runs[unit.name] = self._runs.get(unit.name, 0) + 1
        self.last = unit.name, self._runs[unit.name]
        self._mark_nbytes += offloaded_nbytes  # not of the rest
        self._rest_nbytes = self._offloader.counts.offloaded_nbytes - self._mark_nbytes
        self._offloader.counts.largest_nbytes = 0

        def gradient_is_there(gradient: torch.Tensor) -> None:  # noqa: ARG001
            if sight.gradient is None:
                sight.gradient = self._clock.mark()
                self._backward_begins()
                self._gradients.append((unit.name, sight.gradient))

        for tensor in returned:
            if tensor.grad_fn is not None:
                tensor.register_hook(gradient_is_there)

    def _measured(self, action: Action, units: Sequence[Unit], offloader: Offloader | None) -> "Measured":
        return Measured(action, units, offloader, self)

    def _begins(self, module: nn.Module, args: object) -> None:  # noqa: ARG002
        if not torch.is_grad_enabled():
            return
        if self._in_backward:  # that was another step
            self._sights, self._gradients, self._in_backward = {}, [], False
        if not self._sights:
            self._mark_nbytes, self._end_nbytes = self._offloader.counts.offloaded_nbytes, 0
        self._before, self._runs, self._offloader.counts.largest_nbytes = None, {}, 0

    def _ends(self, module: nn.Module, args: object, output: object) -> None:  # noqa: ARG002
        if not torch.is_grad_enabled():
            return
        outside_nbytes = self._offloader.counts.offloaded_nbytes - self._mark_nbytes
        if not self._runs:  # without units there is no end of the last
            self._rest_nbytes = outside_nbytes
        self._end_nbytes += outside_nbytes - self._rest_nbytes
        self._mark_nbytes += outside_nbytes - self._rest_nbytes
        self._after_nbytes = self._offloader.counts.largest_nbytes
        for tensor in tensors_in(output):  # no gradient need come to a unit
            if tensor.grad_fn is not None:
                tensor.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: torch.Tensor | None = None) -> None:  # noqa: ARG002
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._backward_over)

    def _backward_over(self) -> None:
        self._over = self._clock.mark()
        self.steps += 1


class Measured(Stretch):
    """A unit that is looked at whenever it runs."""

    def __init__(self, action: Action, units: Sequence[Unit], offloader: Offloader | None, survey: Survey) -> None:
        super().__init__(action, units, offloader)
        self._survey, self._counts = survey, offloader.counts if offloader is not None else None

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Once to look, once in earnest."""
        if not torch.is_grad_enabled() or self._counts is None:
            return function(*args, **kwargs)
        recomputes = self._survey.see(self.units[0], function, args, kwargs)
        self.action = "recompute+offload" if recomputes else "offload"
        before = self._counts.offloaded_nbytes
        try:
            output = super().run(function, args, kwargs)
        except RuntimeError as error:
            error.add_note(f"block {self.units[0].name!r} was run twice, to measure it: {KEEPS}")
            raise
        self._survey.seen(self.units[0], output, self._counts.offloaded_nbytes - before)
        return output


class Counted:
    """Saved-tensor hooks that count the bytes of each storage once and let it go."""

    def __init__(self, unit: Unit) -> None:
        self._name = unit.name
        held = (tensor for part in unit.parts for tensor in (*part.parameters(), *part.buffers()))
        self._fixed = {StorageWeakRef(tensor.untyped_storage()) for tensor in held}
        self.nbytes: dict[StorageWeakRef, int] = {}  # a weak reference, so that no other storage gets its address

    def pack(self, tensor: torch.Tensor) -> None:
        """Count it."""
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage not in self._fixed:
            self.nbytes[storage] = tensor.untyped_storage().nbytes()

    def unpack(self, packed: object) -> torch.Tensor:  # noqa: ARG002
        """Nothing of what the clock and the count were for is differentiated, unless the block has kept it."""
        raise RuntimeError(f"block {self._name!r} was run twice, and something of its first run is used: {KEEPS}")


def survey(model: nn.Module, step: Callable[[], None], offloader: Offloader) -> list[Block]:
    """The blocks of ``model`` as seen in the second of two calls of ``step``, a forward and backward of it."""
    seen = Survey(model, offloader)
    try:
        step()
        step()
        return seen.blocks()
    finally:
        seen.undo()


def measure_link(device: torch.device, nbytes: int = LINK_NBYTES) -> HostLink:
    """How fast pinned memory is reached from ``device`` and it from there, while bytes go both ways."""
    copies, clock = copies_for(device), clock_for(device)
    pool = HostPool(device.type == "cuda")
    outward, homeward = pool.take(nbytes), pool.take(nbytes)
    assert outward is not None and homeward is not None
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    seconds = (1.0, 1.0)
    for _ in range(2):  # the first time memory is touched does not count
        start = clock.mark()
        done = copies.out(source, outward)
        space, arrived = copies.back(homeward, nbytes, None)
        copies.wait(done)
        out_at = clock.mark()
        copies.wait(arrived)
        back_at = clock.mark()
        clock.settle()
        seconds = (clock.between(start, out_at), clock.between(start, back_at))
        del space
    clock.close()
    return HostLink(nbytes / max(seconds[0], 1e-9), nbytes / max(seconds[1], 1e-9))
