"""The graphs that torch.compile has made of one model: where each is cut, and why some cannot be."""

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

from torch import fx, nn

from anabranch.ddp.compiled.cut_points import (
    Cuts,
    GraphShape,
    cuts_for,
    fine_cuts,
    has_dynamic_shapes,
    is_connected,
    shape_of,
)

Compiled = Callable[..., Any]
# Compiles a graph in parts, given its inputs; at first inside torch's own compilation, ``again`` outside of it.
CompileParts = Callable[[fx.GraphModule, Cuts, Sequence[Any], bool], Compiled]
Parts = Sequence[Sequence[str]]  # names of gradients that leave together, in order

DYNAMO_UTILS = "torch._dynamo.utils"  # only programs that compile have imported it
CUT_MODE = "ddp_optimizer"  # in this mode torch's compiler cuts graphs for DDP
DYNAMIC_SHAPES = (
    "a graph has dynamic shapes, so it stays as it is: cut for the plan that there was when torch compiled it, or else "
    "by bytes, as for DDP; inputs of one shape, or torch.compile(dynamic=False), let the plan cut it"
)
SEVERAL_MODULES = (
    "one graph serves several modules, as where blocks are compiled one by one (their gradients leave block by block) "
    "or where two models have one class: it stays cut as it was for the first"
)
IN_PLACE = (
    "a graph cannot be cut, since operations in place (x += y) connect it from end to end: torch cuts it by bytes; "
    "writing x = x + y lets the plan cut it"
)

_WRAPPED: "weakref.WeakSet[CompiledGraphs]" = weakref.WeakSet()


class CompiledGraphs:
    """The compiled graphs of one model whose gradients these parameters get.

    At first graphs are cut finely, so that recorded times show when gradients could leave. ``cut_for`` has them
    compiled again, in the next forward. Nothing here communicates: on another rank graphs may be cut otherwise.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._nbytes = {name: p.numel() * p.element_size() for name, p in parameters.items()}
        self._names = {id(p): name for name, p in parameters.items()}
        self.parts: Parts | None = None  # what graphs are cut for; None: as finely as at first
        self._settled = False
        self._notes: dict[str, None] = {}  # in the order in which they were found
        self._graphs: list[weakref.ref[CutGraph]] = []  # weak: torch drops graphs that it compiles again
        self._codes: set[CodeType] = set()  # the code of forward() of each part of the module
        self.round = 0  # counts the changes of ``parts``

    @property
    def cuts_graphs(self) -> bool:
        """Whether there is a plan to cut for, or may be one."""
        return bool(self._names) and not (self._settled and self.parts is None)

    def install(self, module: nn.Module) -> None:
        """Have torch ask this object where to cut the graphs of this module, should it compile them.

        Call it in each forward: torch imports its compiler in the first one.
        """
        if self in _WRAPPED:
            return
        self._codes = _forward_codes(module)
        try:
            from torch._C._dynamo.eval_frame import reset_code

            from anabranch.ddp.compiled.graph_cutter import install

            install()
            # Torch keeps graphs by the code of forward(): it would use those it made before the module was wrapped,
            # which are not cut. Models that were wrapped before, of the same classes, keep theirs.
            for code in self._codes.difference(*(other._codes for other in _WRAPPED if other._alive)):
                reset_code(code)
        except (ImportError, RuntimeError) as error:
            self.note(f"torch cuts graphs by bytes, and not where buckets end, since {error}")
        _WRAPPED.add(self)

    def close(self) -> None:
        """The wrapper is closed: torch must not use its graphs for the next wrapper of this module."""
        _WRAPPED.discard(self)

    # Called by torch, through graph_cutter.py.

    def compile(self, graph: fx.GraphModule, inputs: Sequence[Any], compile_parts: CompileParts) -> Compiled | None:
        """The compiled graph, to be called instead of it; None if torch is to cut it."""
        if not self.cuts_graphs:
            return None
        names = [self._names.get(id(value)) for value in inputs]
        shape = shape_of(graph.graph, names, self._nbytes)
        model_nbytes = sum(self._nbytes.values())
        if is_connected(shape, model_nbytes):
            self.note(IN_PLACE)
            return None
        if not shape.first_use:
            return None
        fine = fine_cuts(shape, model_nbytes)
        is_dynamic = bool(fine) and has_dynamic_shapes(graph.graph)
        if is_dynamic:
            self.note(DYNAMIC_SHAPES)
            for older in self._alive:  # torch has compiled them again, for all shapes
                if older.shape.first_use.keys() == shape.first_use.keys():
                    older.settle()
            if self.parts is None:
                return None  # fine cuts would stay for good, whatever they cost
        sample = names.index(next(iter(shape.first_use)))
        made = CutGraph(self, graph, shape, fine, sample, inputs, compile_parts)
        if self._settled or is_dynamic:
            made.settle()
        self._graphs.append(weakref.ref(made))
        return made

    def note(self, obstacle: str) -> None:
        """Remember an obstacle to cutting by the plan, for explain()."""
        self._notes[obstacle] = None

    # Called by the tuner.

    @property
    def can_change(self) -> bool:
        """Whether there is a graph that can be compiled again."""
        return any(graph.can_change for graph in self._alive)

    def cuts_for(self, parts: Parts | None) -> int:
        """Count the cuts in all graphs if they are cut for these parts; None: as finely as at first."""
        return sum(len(graph.cuts_for(parts)) for graph in self._alive)

    def would_change(self, parts: Parts) -> bool:
        """Whether ``cut_for`` would have a graph compiled again."""
        return any(graph.can_change and graph.cuts != graph.cuts_for(parts) for graph in self._alive)

    def cut_for(self, parts: Parts | None) -> None:
        """Let these gradients leave together, part by part, from the next forward on; None: as finely as at first."""
        self.parts = parts
        self.round += 1

    def settle(self) -> None:
        """Keep the cuts in force for good: what was compiled for others is dropped."""
        self._settled = True
        for graph in self._alive:
            graph.settle()

    def note_late(self, what: str) -> None:
        """All gradients came at the end of backward: note why, for explain(); ``what`` if no reason is known."""
        is_cut = any(graph.cuts for graph in self._alive)  # then they came late by chance, or the model is odd
        if not self._notes and not is_cut:
            self.note(_uncut_reason() or what)

    def lines(self) -> list[str]:
        """For explain(): how graphs are cut, and obstacles to cutting by the plan."""
        lines = []
        if graphs := self._alive:
            parts = sum(len(graph.cuts) + 1 for graph in graphs)
            finely = "finely" if self._settled else "finely, to see when gradients could leave"
            where = finely if self.parts is None else "where buckets end"
            several = "s" * (len(graphs) > 1), "s" * (parts > 1)
            lines.append(f"Compiled: {len(graphs)} graph{several[0]} in {parts} part{several[1]}, cut {where}.")
        elif (reason := _uncut_reason()) and _has_compiled():
            self.note(reason)
        return [*lines, *(f"Compiled: {note}." for note in self._notes)]

    @property
    def _alive(self) -> list["CutGraph"]:
        return [graph for reference in self._graphs if (graph := reference()) is not None]


def _forward_codes(module: nn.Module) -> set[CodeType]:
    """The code of each forward method in a module that torch may compile."""
    kinds = {type(part) for part in module.modules() if not type(part).__module__.startswith("torch.")}
    return {kind.forward.__code__ for kind in kinds if hasattr(kind.forward, "__code__")}


def optimize_ddp_mode() -> str:
    """What torch's compiler does for DDP; its default where a program has not imported it."""
    utils: Any = sys.modules.get(DYNAMO_UTILS)
    return utils.get_optimize_ddp_mode() if utils is not None else CUT_MODE


def _uncut_reason() -> str:
    """Why torch does not ask where to cut; empty if it does."""
    mode = optimize_ddp_mode()
    if mode == CUT_MODE:
        return ""
    return (
        f'torch._dynamo.config.optimize_ddp is "{mode}", so torch cuts no graph of a compiled model, and all gradients '
        "come at the end of backward; leave it at True"
    )


def _has_compiled() -> bool:
    """Whether torch has compiled any graph in this process."""
    utils: Any = sys.modules.get(DYNAMO_UTILS)
    return utils is not None and utils.counters["stats"]["unique_graphs"] > 0


class CutGraph:
    """A graph compiled in parts; call it as the graph. When its cuts change, the next call compiles it again."""

    def __init__(
        self,
        owner: CompiledGraphs,
        graph: fx.GraphModule,
        shape: GraphShape,
        fine: Cuts,
        sample: int,
        inputs: Sequence[Any],
        compile_parts: CompileParts,
    ) -> None:
        self.shape = shape
        self.fine = fine
        self.cuts = self.cuts_for(owner.parts)
        self._owner = owner
        self._graph: fx.GraphModule | None = graph  # None once it stays as it is
        self._compile_parts = compile_parts
        self._sample = sample  # the place among the inputs of one parameter
        self._sample_id = id(inputs[sample])
        self._round = owner.round
        self._run = compile_parts(graph, self.cuts, inputs, False)
        self._compiled = {self.cuts: self._run}

    @property
    def can_change(self) -> bool:
        """Whether it can be compiled again."""
        return self._graph is not None

    def cuts_for(self, parts: Parts | None) -> Cuts:
        """Where it is cut for these parts; ``fine``, which is where it may be cut, for None."""
        return self.fine if parts is None else cuts_for(parts, self.shape, self.fine)

    def settle(self) -> None:
        """Stay as it is."""
        self._graph = None
        self._compiled.clear()

    def __call__(self, *inputs: Any) -> Any:
        if self._graph is not None:
            if id(inputs[self._sample]) != self._sample_id:
                self._owner.note(SEVERAL_MODULES)
                self.settle()
            elif self._round != self._owner.round:
                self._change(inputs)
        return self._run(*inputs)

    def _change(self, inputs: Sequence[Any]) -> None:
        self._round = self._owner.round
        self.cuts = self.cuts_for(self._owner.parts)
        if self.cuts not in self._compiled:
            assert self._graph is not None
            self._compiled[self.cuts] = self._compile_parts(self._graph, self.cuts, inputs, True)
        self._run = self._compiled[self.cuts]
