"""What a model sharded by FSDP2 does in a step: when each unit gathers, computes, reduces and averages.

    watch = ab.watch(model)   # after fully_shard() and ab.replicate()
    ...                       # some steps
    print(watch.explain())

Messages are timed where FSDP2 lets a custom collective in, and between nodes by its all-reduce hook. Each block has
hooks before and after FSDP2's own, so that waiting for parameters is told apart from computing.
"""

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FSDPModule

from anabranch.fsdp.planning import Block, Links, ShardedTrace, ShardingPlan, Unit, simulate
from anabranch.fsdp.planning.sharded_step import BETWEEN, INSIDE, REST_LABEL, unit_label
from anabranch.fsdp.replicate import no_average
from anabranch.fsdp.torch_internals import gradient_dtype, is_finalized_by_hand, sharded_units
from anabranch.observe.clock import clock_for
from anabranch.observe.step_timer import tensors_in
from anabranch.values.checks import Meta
from anabranch.values.timeline import COMPUTE, Span, Timeline

KEEP = 16  # steps


@dataclass(slots=True)
class _Pass:
    """A forward and its backward, in marks of the clock.

    rooted     the parameters of the rest are there
    due        by block: its forward could begin, had it its parameters
    forward    by block, in the order of forward: begin and end; ``backward`` likewise
    lost       the loss is over: the last block's backward could begin
    messages   (track, what, unit, begin, end) in the order in which they were launched
    averaged   all gradients are reduced; ``updated``: the next step begins
    """

    begun: object
    rooted: object | None = None
    due: dict[str, object] = field(default_factory=dict)
    forward: dict[str, list[object]] = field(default_factory=dict)
    lost: object | None = None
    backward: dict[str, list[object]] = field(default_factory=dict)
    messages: list[tuple[str, str, str, object, object]] = field(default_factory=list)
    averaged: object | None = None
    updated: object | None = None


@dataclass(frozen=True, slots=True)
class _WatchedUnit:
    """A unit of FSDP2's: its label, its blocks by name, and its parameter groups."""

    label: str
    blocks: dict[str, nn.Module]
    groups: list[Any]


def watch(model: nn.Module) -> "Watch":
    """Watch the steps of a model that FSDP2 shards, from now on. Call it after fully_shard() and ``ab.replicate``."""
    return Watch(model)


class Watch:
    """Recorded steps of a sharded model; ``watch`` makes it. Results are of the last steps on this rank."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._units = _watched_units(model)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        # Where it computes: parameters that are offloaded are on the CPU.
        self._device = next(group.device for unit in self._units for group in unit.groups)
        self._clock = clock_for(self._device)
        self._passes: deque[_Pass] = deque(maxlen=KEEP)
        self._now: _Pass | None = None
        self._ended: _Pass | None = None  # waits for the next one, until which the optimizer runs
        self._why = "none was made"  # the last pass was not recorded
        self._undo = ExitStack()
        self._gradients: list[Any] = []  # handles of hooks for this pass
        self._averages: list[Callable[[torch.Tensor], None]] = []  # our hooks around the exchange between nodes
        # In front of FSDP2's own hook, and behind it.
        self._undo.callback(model.register_forward_pre_hook(self._begin_pass, prepend=True).remove)
        self._undo.callback(model.register_forward_pre_hook(self._mark_rooted).remove)
        for unit in self._units:
            for name, module in unit.blocks.items():
                self._hook_block(name, module)
            for group in unit.groups:
                self._time_messages(unit, group)

    # ------------------------------------------------------------------------------------------------- results

    @property
    def plan(self) -> ShardingPlan:
        """The units as they are; in the order of forward, once a step was recorded."""
        order = list(self._passes[-1].forward) if self._passes else [n for unit in self._units for n in unit.blocks]
        units = []
        for unit in self._units:
            if names := sorted(unit.blocks, key=order.index):
                units.append(Unit(tuple(names), all(group._reshard_after_forward for group in unit.groups)))
        units.sort(key=lambda unit: order.index(unit.names[0]))
        prefetched = (len(unit.state._states_to_forward_prefetch) for unit in sharded_units(self._model))
        return ShardingPlan(tuple(units), max(1, *prefetched))

    def trace(self) -> ShardedTrace:
        """What the blocks compute and weigh: medians over the recorded steps of this rank."""
        passes = self._recorded()
        order = list(passes[-1].forward)
        unit_of = {name: unit for unit in self._units for name in unit.blocks}
        blocks = []
        for name, following in zip(order, [*order[1:], None], strict=True):
            forward_s = median(self._forward_s(one, name, following) for one in passes)
            backward_s = median(self._clock.elapsed_s(*one.backward[name]) for one in passes)
            blocks.append(Block(name, *self._sizes(unit_of[name], name), forward_s, backward_s))
        rest = [self._sizes(unit) for unit in self._units if not unit.blocks]
        device = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU"
        meta: Meta = {"source": "recorded", "steps": len(passes), "torch": torch.__version__, "device": device}
        return ShardedTrace(
            tuple(blocks), sum(nbytes for nbytes, _ in rest), sum(nbytes for _, nbytes in rest),
            median(max(0.0, self._clock.elapsed_s(one.rooted, one.due[order[0]])) for one in passes),
            median(self._clock.elapsed_s(one.forward[order[-1]][1], one.lost) for one in passes),
            median(self._clock.elapsed_s(one.averaged, one.updated) for one in passes),
            meta,
        )  # fmt: skip

    def timeline(self) -> Timeline:
        """The recorded step of median length, on three tracks: computing, messages inside, messages between nodes."""
        passes = self._recorded()
        one = sorted(passes, key=lambda one: self._clock.elapsed_s(one.begun, one.updated))[len(passes) // 2]
        return Timeline(self._spans(one), {"source": "measured", "units": len(self.plan), "steps": len(passes)})

    def metrics(self) -> dict[str, float]:
        """Numbers for a logger, of the step of median length: seconds of the step, of computing, of messages."""
        timeline = self.timeline()
        busy_s = {
            f"{track}_s": sum(span.seconds for span in timeline.spans if span.track == track)
            for track in (COMPUTE, INSIDE, BETWEEN)
        }
        return {
            "step_s": timeline.iteration_s,
            **busy_s,
            "exposed_s": timeline.exposed_s,
            "overlap": timeline.overlap,
        }

    def explain(self, links: Links | None = None) -> str:
        """Where the time of a step goes, by unit; with the costs of ``links``, also what was predicted."""
        plan, timeline, metrics = self.plan, self.timeline(), self.metrics()
        ms = {name: value * 1e3 for name, value in metrics.items()}
        lines = [
            f"anabranch: {plan.described()}.",
            f"A step takes {ms['step_s']:.1f} ms: {ms['compute_s']:.1f} ms of computing; messages inside "
            f"{ms['inside_s']:.1f} ms, between nodes {ms['between_s']:.1f} ms; of these, {ms['exposed_s']:.1f} ms are "
            "not hidden behind computing.",
        ]
        if links is not None:
            predicted_s = simulate(self.trace(), plan, links).iteration_s
            error = (predicted_s / metrics["step_s"] - 1) * 100
            lines.append(f"Predicted: {predicted_s * 1e3:.1f} ms ({error:+.0f} %).")
        kinds = ("gather", "forward", "backward", "reduce", "average")
        lines.append(f"{'ms':<32}" + "".join(f"{kind:>10}" for kind in kinds))
        for unit in self._units:
            sums = [sum(span.seconds for span in timeline.spans if span.name == f"{k} {unit.label}") for k in kinds]
            lines.append(f"{unit.label[:31]:<32}" + "".join(f"{seconds * 1e3:>10.2f}" for seconds in sums))
        return "\n".join(lines)

    def close(self) -> None:
        """Remove all hooks; FSDP2's own collectives are used again."""
        self._undo.close()
        self._forget_gradients()
        self._now = None
        self._clock.close()

    # ----------------------------------------------------------------------------------------------- recording

    def _begin_pass(self, *_: object) -> None:
        """Runs before FSDP2's hook on the model; marks where a step begins."""
        if not torch.is_grad_enabled():
            return
        if self._ended is not None:
            self._ended.updated = self._clock.mark()
            self._passes.append(self._ended)
        self._ended, self._now = None, _Pass(self._clock.mark())

    def _mark_rooted(self, *_: object) -> None:
        if self._now is not None:
            self._now.rooted = self._clock.mark()

    def _hook_block(self, name: str, module: nn.Module) -> None:
        outputs: list[torch.Tensor] = []  # as FSDP2 has its hook on them: what it returns may be a cast of them

        def due(*_: object) -> None:
            if self._now is not None:
                self._now.due.setdefault(name, self._clock.mark())

        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            one = self._now
            if one is None or name in one.forward:  # recomputed in backward
                return
            one.forward[name] = [self._clock.mark(), None]
            ended = partial(self._backward_ended, one, name)
            tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.requires_grad)
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            if (activations := next(tensors, None)) is not None:
                activations.register_hook(ended)
            elif trained:  # the first block: its backward ends with its gradients
                self._gradients.append(register_multi_grad_hook(trained, ended, mode="all"))

        def end(*_: object) -> None:
            one = self._now
            if one is not None and one.forward[name][1] is None:
                one.forward[name][1] = self._clock.mark()
                for tensor in outputs:
                    tensor.register_hook(partial(self._backward_begun, one, name))
            outputs.clear()

        def loss_ends(module: nn.Module, args: object, output: Any) -> None:  # noqa: ARG001
            if self._now is not None:
                outputs[:] = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
                for tensor in outputs:
                    tensor.register_hook(partial(self._mark_loss_end, self._now))

        for handle in (
            module.register_forward_pre_hook(due, prepend=True),
            module.register_forward_pre_hook(begin, with_kwargs=True),
            module.register_forward_hook(loss_ends, prepend=True),
            module.register_forward_hook(end),
        ):
            self._undo.callback(handle.remove)

    def _mark_loss_end(self, one: _Pass, gradient: torch.Tensor) -> None:  # noqa: ARG002
        """Runs before FSDP2's hook on the output of a block, of the last block first; marks where the loss ends."""
        if one.lost is None:
            one.lost = self._clock.mark()
            # Callbacks run in order when backward ends; FSDP2 has queued the one that waits for reductions.
            queue = Variable._execution_engine.queue_callback
            queue(lambda: queue(partial(self._end_pass, one)))

    def _backward_begun(self, one: _Pass, name: str, gradient: torch.Tensor) -> None:  # noqa: ARG002
        one.backward.setdefault(name, [self._clock.mark(), None])

    def _backward_ended(self, one: _Pass, name: str, *gradients: object) -> None:  # noqa: ARG002
        if name in one.backward:
            one.backward[name][1] = self._clock.mark()

    def _end_pass(self, one: _Pass) -> None:
        one.averaged = self._clock.mark()
        self._forget_gradients()
        if one is self._now:
            self._why = self._why_incomplete(one)
            self._ended = None if self._why else one
            self._now = None

    def _forget_gradients(self) -> None:
        for handle in self._gradients:
            handle.remove()
        self._gradients.clear()

    def _why_incomplete(self, one: _Pass) -> str:
        """Why this pass is no whole step; empty if it is one."""
        block: Any = next(module for unit in self._units for module in unit.blocks.values())
        groups = [group for unit in self._units for group in unit.groups]
        if is_finalized_by_hand(block) or not all(one.reduce_grads and one.all_reduce_grads for one in groups):
            return (
                "the last backward did not reduce all gradients (set_requires_gradient_sync, set_requires_all_reduce, "
                "set_manual_backward_finalization)"
            )
        if {group._all_reduce_hook for group in groups} - {None, no_average, *self._averages}:
            return "ab.replicate() came after ab.watch(): close() this watch, and make another one"
        for name in (name for unit in self._units for name in unit.blocks):
            if name not in one.forward:
                return f"{name} was not called in the last forward: leave it out of the units"
            if one.backward.get(name, [None, None])[1] is None:
                return f"the last backward did not pass through {name}"
        return ""

    def _time_messages(self, unit: _WatchedUnit, group: Any) -> None:
        for part, what in (("_all_gather_comm", "gather"), ("_reduce_scatter_comm", "reduce")):
            record = partial(self._record_message, INSIDE, what, unit.label)
            self._replace(group, part, _TimedCollective(getattr(group, part), record, self._clock))
        hook = group._all_reduce_hook
        if hook is not None or group._is_hsdp:
            self._averages.append(partial(self._average, unit.label, hook))
            self._replace(group, "_all_reduce_hook", self._averages[-1])

    def _replace(self, group: Any, part: str, ours: object) -> None:
        """Set a part of FSDP2's until close(). FSDP2's own setters refuse units of several groups."""
        theirs = getattr(group, part)
        setattr(group, part, ours)

        def undo() -> None:
            # Else it was replaced again: by Replication.close(), after which its old hook must not come back.
            if getattr(group, part) is ours:
                setattr(group, part, theirs)

        self._undo.callback(undo)

    def _average(self, label: str, hook: Callable[[torch.Tensor], None] | None, buffer: torch.Tensor) -> None:
        """FSDP2's hook: behind the all-reduce of HSDP, which began when the reduce-scatter was over; else around it."""
        start = self._clock.mark()
        if hook is not None:
            hook(buffer)
        elif self._now is not None:
            # Nodes of one rank have no reduce-scatter, and this mark alone.
            start = next((end for _, _, of, _, end in reversed(self._now.messages) if of == label), start)
        self._record_message(BETWEEN, "average", label, start, self._clock.mark())

    def _record_message(self, track: str, what: str, label: str, start: object, end: object) -> None:
        if self._now is not None:
            self._now.messages.append((track, what, label, start, end))

    # ------------------------------------------------------------------------------------------------- reading

    def _recorded(self) -> list[_Pass]:
        if not self._passes:
            raise RuntimeError(
                f"no step was recorded yet: {self._why}; train two or more steps after watch(), each with a forward of "
                "the whole model and a backward that reduces gradients"
            )
        self._clock.settle()
        return list(self._passes)

    def _forward_s(self, one: _Pass, name: str, following: str | None) -> float:
        """Until the next block is due: what is computed between two blocks counts as the first one's."""
        begin, end = one.forward[name]
        return max(0.0, self._clock.elapsed_s(begin, one.due[following] if following is not None else end))

    def _spans(self, one: _Pass) -> tuple[Span, ...]:
        """What happened in a pass, in the order of its begin. Time zero: backward starts."""
        names = list(one.forward)
        at = partial(self._clock.elapsed_s, one.backward[names[-1]][0])
        spans = [Span(COMPUTE, "before", at(one.rooted), max(at(one.rooted), at(one.due[names[0]])))]
        for unit in self._units:
            if order := [name for name in names if name in unit.blocks]:
                first, last = order[0], order[-1]
                for what, begun, ended in (
                    ("forward", one.forward[first][0], one.forward[last][1]),
                    ("backward", one.backward[last][0], one.backward[first][1]),
                ):
                    spans.append(Span(COMPUTE, f"{what} {unit.label}", at(begun), at(ended)))
        spans.append(Span(COMPUTE, "loss", at(one.forward[names[-1]][1]), at(one.lost)))
        spans.append(Span(COMPUTE, "update", at(one.averaged), at(one.updated)))
        free_s = dict.fromkeys((INSIDE, BETWEEN), at(one.begun))
        for track, what, label, start, end in one.messages:
            # A track carries one message at a time: one that was launched before has to end first.
            start_s = max(at(start), free_s[track])
            free_s[track] = max(at(end), start_s)
            spans.append(Span(track, f"{what} {label}", start_s, free_s[track]))
        return tuple(sorted(spans, key=lambda span: span.start_s))

    def _sizes(self, unit: _WatchedUnit, block: str = "") -> tuple[int, int]:
        """Bytes that are gathered and that are reduced for a block; for the whole unit where none is named."""
        nbytes = gradient_nbytes = 0
        for one in (one for group in unit.groups for one in group.fsdp_params):
            parameter = one.sharded_param
            if not block or self._names[parameter].startswith(f"{block}."):
                numel = parameter.numel()
                nbytes += numel * (one.mp_policy.param_dtype or parameter.dtype).itemsize
                gradient_nbytes += numel * gradient_dtype(one).itemsize * parameter.requires_grad
        return nbytes, gradient_nbytes


class _TimedCollective:
    """A collective of FSDP2's with marks around it."""

    def __init__(self, inner: Any, record: Callable[[object, object], None], clock: Any) -> None:
        self._inner, self._record, self._clock = inner, record, clock

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = self._clock.mark()
        result = self._inner(*args, **kwargs)
        self._record(start, self._clock.mark())
        return result


def _watched_units(model: nn.Module) -> list[_WatchedUnit]:
    """FSDP2's units in the order of the model's modules; one that holds others has no block, and is of the rest."""
    found = []
    for modules, _, groups in sharded_units(model):
        path, first = next(iter(modules.items()))
        holds_others = any(isinstance(inner, FSDPModule) for inner in first.modules() if inner is not first)
        if groups or not holds_others:
            blocks = {} if holds_others or not path else dict(modules)
            found.append(_WatchedUnit(unit_label(list(blocks)) if blocks else path or REST_LABEL, blocks, groups))
    if not any(unit.blocks and unit.groups for unit in found):
        raise ValueError(
            "the model has no units to watch: call ab.shard(model, mesh), or fully_shard() for its blocks and itself"
        )
    return found
