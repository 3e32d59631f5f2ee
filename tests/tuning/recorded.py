"""Trainings as they were tuned, written down: the steps that one rank timed, what ranks agreed on, and each choice.

``Recording`` writes down a live training on rank 0. ``replay`` runs the tuner again on what was written down, without a
model and without other ranks: nothing is measured, so the choices depend on decisions alone.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from anabranch import DataParallel, Plan, TuningPolicy
from anabranch.ddp.compiled.graphs import CompiledGraphs
from anabranch.exchange.collectives import Collectives
from anabranch.observe.clock import HostClock
from anabranch.observe.measure import measure
from anabranch.observe.step_timer import StepMarks, StepObserver
from anabranch.tuning import calibration, tuner
from anabranch.tuning.cache_files import CachedChoice, CacheKey, Entry
from anabranch.tuning.candidates import BackgroundPlanner
from anabranch.tuning.options import TuningOptions
from anabranch.tuning.training_cache import TrainingCache
from anabranch.tuning.tuner import Tuner
from anabranch.values.files import document_of, loads

FOLDER = Path(__file__).parents[1] / "data" / "tuning"
DIGITS = 7  # of seconds
AGREED = (torch.float64, torch.int32)  # dtypes of what ranks reduce to agree on; gradients are none of these
KEY = CacheKey("model", "input", (), ())

Step = dict[str, Any]
Training = dict[str, Any]


class Recording(StepObserver):
    """A context in which a DataParallel is made and trained; ``training`` is what happened, for a file.

    On a GPU every step waits for the device, so that its marks are known when it ends.
    """

    def __init__(self) -> None:
        self.training: Training = {
            "steps": [], "readings_s": [], "agreed": [], "measured": [], "planned": [], "cached": [], "cuts": {},
            "calls": {}, "choices": [],
        }  # fmt: skip
        self._model: DataParallel | None = None
        self._inside = False
        self._patches = ExitStack()

    def __enter__(self) -> "Recording":
        written, enter = self.training, self._patches.enter_context
        reading, reduce = perf_counter, dist.all_reduce

        def read() -> float:
            written["readings_s"].append(round(reading(), DIGITS))
            return float(written["readings_s"][-1])

        def all_reduce(values: torch.Tensor, op: Any = dist.ReduceOp.SUM, *more: Any, **named: Any) -> Any:
            result = reduce(values, op, *more, **named)
            if not self._inside and values.dtype in AGREED and op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
                if values.dtype == torch.float64:
                    values.copy_(values.double().mul(10**DIGITS).round().div(10**DIGITS))
                written["agreed"].append(values.tolist())
            return result

        enter(_noted(BackgroundPlanner, "done", lambda done: written["planned"].append(done)))
        enter(_noted(BackgroundPlanner, "outcome", lambda found: written["planned"].append(_outcome(found))))
        enter(mock.patch.object(tuner, "perf_counter", read))
        enter(mock.patch.object(dist, "all_reduce", all_reduce))
        enter(mock.patch.object(calibration, "measure", self._apart(measure, document_of, "measured")))
        enter(mock.patch.object(TrainingCache, "read", self._apart(TrainingCache.read, _text, "cached")))
        return self

    def _apart(self, function: Callable[..., Any], text: Callable[[Any], Any], name: str) -> Callable[..., Any]:
        """The function, whose results are written down; what ranks agree on inside is not."""

        def apart(*args: Any, **named: Any) -> Any:
            self._inside = True
            result = function(*args, **named)
            self._inside = False
            self.training[name].append(text(result))
            return result

        return apart

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def watch(self, model: DataParallel) -> None:
        """Call this with the model, once it is made."""
        tuner = model._tuner
        assert tuner is not None
        self._model = model
        tuner.runner.timer.observers.append(self)
        graphs, cuts = tuner._graphs, self.training["cuts"]
        if type(graphs).__name__ == "CompiledGraphs":
            for name in ("cuts_for", "would_change"):
                method = getattr(graphs, name)
                setattr(graphs, name, _keyed(method, name, graphs, cuts))
        options, collectives = tuner.search.options, tuner.collectives
        kinds = ("dense", "bf16", *options.kinds)
        self.training["given"] = {
            "options": {
                "planner": options.planner if isinstance(options.planner, str) else options.planner.__name__,
                "plan": document_of(options.plan) if isinstance(options.plan, Plan) else None,
                "network": document_of(options.network) if options.network is not None else None,
                "lanes": options.lanes, "profile_steps": options.profile_steps, "kinds": options.kinds,
                "excluded": {kind: sorted(names) for kind, names in options.excluded.items()},
                "mixes": options.mixes,
            },
            "policy": {name: getattr(tuner._policy, name) for name in TuningPolicy.__dataclass_fields__},
            "parameters": {name: list(p.shape) for name, p in tuner.runner.parameters.items()},
            "warmup_steps": collectives.residuals.warmup_steps,
            "keep_memory": collectives.residuals.keeps_any,
            "with_residual": [kind for kind in kinds if collectives.residuals.keeps(kind)],
            "has_cache": tuner._cache is not None,
            "is_compiled": type(graphs).__name__ == "CompiledGraphs",
        }  # fmt: skip

    def call(self, name: str) -> None:
        """Call ``hold`` or ``replan`` of the model before the next step."""
        assert self._model is not None
        self.training["calls"][str(len(self.training["steps"]))] = name
        getattr(self._model, name)()

    def on_step_end(self, step: StepMarks) -> None:
        assert self._model is not None and self._model._tuner is not None
        tuner = self._model._tuner
        clock = tuner.runner.timer.clock
        clock.settle()

        def at(mark: object) -> float | None:
            return None if mark is None else round(clock.elapsed_s(step.forward, mark), DIGITS)

        marks: Step = {"marks": [at(step.backward), at(step.computed), at(step.averaged)]}
        if step.buckets:
            ends = [
                (index, at(launched), clock.elapsed_to_end_s(step.forward, end))
                for index, launched, (end,) in step.buckets  # of flat exchanges
            ]
            marks["buckets"] = [[index, at_s, round(end_s, DIGITS)] for index, at_s, end_s in ends if end_s is not None]
        if step.ready:
            marks["ready"] = {name: at(mark) for name, mark in step.ready.items()}
        if tuner._graphs.can_change:
            marks["can_cut"] = True
        self.training["steps"].append(marks)

    def after_step(self, step: int) -> None:
        """Call this after each step."""
        assert self._model is not None and self._model._tuner is not None
        _note_change(self.training["choices"], step, self._model._tuner)


def replay(training: Training) -> list[list[Any]]:
    """The choices of a tuner that lives through the same steps; needs a process group of one rank."""
    choices: list[list[Any]] = []
    given, world = training["given"], _World(training)
    group = dist.group.WORLD
    assert group is not None
    fields = dict(given["options"])
    for name in ("plan", "network"):
        fields[name] = loads(json.dumps(fields[name]).encode(), name) if fields[name] is not None else None
    if fields["planner"] in ("in_pairs", "scattered"):
        fields["planner"] = lambda *_: None  # a function; what it planned is written down
    fields |= {"excluded": {kind: frozenset(names) for kind, names in fields["excluded"].items()}}
    policy = TuningPolicy(**given["policy"])
    options = TuningOptions(**{**fields, "kinds": tuple(fields["kinds"]), "policy": policy})
    with world.patched():
        cache = cast(TrainingCache, world) if given["has_cache"] else None
        graphs = cast(Any, world.graphs) if given["is_compiled"] else CompiledGraphs({})
        tuner = Tuner(world.layout, group, cast(Collectives, world.collectives), options, "Net", graphs, cache)
        try:
            for number, step in enumerate(training["steps"]):
                _live_through(tuner, world, number, step)
                _note_change(choices, number, tuner)
            return choices
        finally:
            tuner.close()


def _live_through(tuner: Tuner, world: "_World", number: int, step: Step) -> None:
    timer = tuner.runner.timer
    if (called := world.training["calls"].get(str(number))) == "hold":
        tuner.search.held = True
    elif called == "replan":
        tuner.replan_requested = True
    world.graphs.can_change = "can_cut" in step
    tuner.before_forward(averaged=True)
    backward, computed, averaged = step["marks"]
    marks = StepMarks(0.0, backward, computed, buckets=[(i, a, [b]) for i, a, b in step.get("buckets", ())])
    marks.ready = dict(step.get("ready", {}))
    timer.clock = world.clock
    world.clock.now_s = averaged
    timer._end(marks)


class _Clock(HostClock):
    """Its mark is what was written down."""

    now_s = 0.0

    def mark(self) -> float:
        return self.now_s


class _Graphs:
    """Graphs that can be cut as often as was written down."""

    def __init__(self, cuts: Mapping[str, Any]) -> None:
        self.parts: Any = None
        self.can_change = False
        self._cuts = cuts
        self._settled = False

    def cuts_for(self, parts: Any) -> int:
        return int(self._cuts[_key("cuts_for", None, parts)])

    def would_change(self, parts: Any) -> bool:
        return bool(self._cuts[_key("would_change", self.parts, parts)])

    def cut_for(self, parts: Any) -> None:
        self.parts = parts

    def settle(self) -> None: ...

    def note_late(self, what: str) -> None: ...

    def lines(self) -> list[str]:
        return []


class _World:
    """What a tuner met: its collaborators, as they were written down."""

    newest_fits = True

    def __init__(self, training: Training) -> None:
        self.training = training
        self.clock = _Clock()
        self.graphs = _Graphs(training["cuts"])
        given = training["given"]
        self._left = {name: iter(training[name]) for name in ("readings_s", "agreed", "measured", "planned", "cached")}
        self._last_reading_s = 0.0
        parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in given["parameters"].items()}
        self.layout: Any = SimpleNamespace(
            default_label="DDP's own buckets", default_plan=None,
            trained=lambda: parameters, report_averaged=lambda _: None, may_change=lambda _: True,
            can_rebuild=lambda: True, before_forward=lambda: None, use=lambda _: None,
            close=lambda: None,
        )  # fmt: skip
        residuals = SimpleNamespace(
            warmup_steps=given["warmup_steps"],
            keeps_any=given["keep_memory"],
            keeps=lambda kind: kind in given["with_residual"],
            on_step_end=lambda: None,
            loaded=list,
            summary=list,
            use_plan=lambda _: None,
        )
        self.collectives = SimpleNamespace(
            residuals=residuals,
            max_ctas=None,
            nodes=None,
            kinds=tuple(given["options"]["kinds"]),
            supports=lambda *_: True,
            family=lambda _: SimpleNamespace(probe=lambda _: None),
            close=lambda: None,
        )

    @contextmanager
    def patched(self) -> Iterator[None]:
        """A context in which ranks agree, plan and measure as they did."""
        reduce = dist.all_reduce

        def all_reduce(values: torch.Tensor, op: Any = dist.ReduceOp.SUM, *more: Any, **named: Any) -> Any:
            if values.dtype in AGREED and op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
                found = next(self._left["agreed"])
                assert len(found) == len(values), f"{len(values)} numbers are reduced, which were {found}"
                values.copy_(torch.tensor(found, dtype=values.dtype))
                return None
            return reduce(values, op, *more, **named)

        def read() -> float:
            self._last_reading_s = next(self._left["readings_s"], self._last_reading_s)
            return self._last_reading_s

        def measured(*_: Any, **__: Any) -> Any:
            return loads(json.dumps(next(self._left["measured"])).encode(), "network")

        with (
            mock.patch.object(tuner, "perf_counter", read),
            mock.patch.object(dist, "all_reduce", all_reduce),
            mock.patch.object(calibration, "measure", measured),
            mock.patch.object(BackgroundPlanner, "__init__", lambda *_: None),
            mock.patch.object(BackgroundPlanner, "done", lambda _: next(self._left["planned"])),
            mock.patch.object(BackgroundPlanner, "outcome", lambda _: _outcome_of(next(self._left["planned"]))),
        ):
            yield

    # The cache of a training.

    def read(self, *_: object, **__: object) -> CachedChoice | None:
        return _choice_of(next(self._left["cached"]))

    def write(self, *_: object) -> None: ...


def load(path: Path) -> Training:
    """One training, from its file."""
    training: Training = json.loads(path.read_text())
    return training


def save(training: Training, path: Path) -> None:
    """Write a training, a line for each of its parts and for each step."""
    lines = [f"{json.dumps(name)}: {_lines(part)}" for name, part in training.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _lines(part: Any) -> str:
    if not isinstance(part, list) or not part or isinstance(part[0], float):
        return json.dumps(part, separators=(",", ":"))
    return "[\n" + ",\n".join(json.dumps(item, separators=(",", ":")) for item in part) + "\n]"


def _note_change(choices: list[list[Any]], step: int, tuner: Tuner) -> None:
    """Note what is chosen after this step, if it has changed: the stage, the plan of the next step, and all trials."""
    found = tuner.findings()
    trials = [f"{trial.label}{'?' if trial.doubtful else ''}: {trial.result}" for trial in found.trials]
    plan = found.plan
    kept = found.kept.label if found.kept is not None else ""
    choice = [found.stage, plan.fingerprint[:12] if plan is not None else "", kept, "; ".join(trials)]
    if not choices or choices[-1][1:] != choice:
        choices.append([step, *choice])


def _noted(owner: type, name: str, note: Callable[[Any], object]) -> Any:
    """A patch of a method whose results are noted."""
    method = getattr(owner, name)

    def noted(self: Any, *args: Any, **named: Any) -> Any:
        result = method(self, *args, **named)
        note(result)
        return result

    return mock.patch.object(owner, name, noted)


def _keyed(method: Callable[[Any], Any], name: str, graphs: Any, cuts: dict[str, Any]) -> Callable[[Any], Any]:
    def noted(parts: Any) -> Any:
        result = method(parts)
        cuts[_key(name, None if name == "cuts_for" else graphs.parts, parts)] = result
        return result

    return noted


def _key(name: str, running: Any, parts: Any) -> str:
    def brief(parts: Any) -> str:
        return "-" if parts is None else "|".join(",".join(part) for part in parts)

    return f"{name} {brief(running)} {brief(parts)}"


def _outcome(found: tuple[Sequence[tuple[str, Plan]], str]) -> list[Any]:
    return [[[label, document_of(plan)] for label, plan in found[0]], found[1]]


def _outcome_of(written: list[Any]) -> tuple[list[tuple[str, Any]], str]:
    return [(label, loads(json.dumps(plan).encode(), "plan")) for label, plan in written[0]], written[1]


def _text(choice: CachedChoice | None) -> Any:
    return None if choice is None else json.loads(Entry(KEY, choice).text())


def _choice_of(written: Any) -> CachedChoice | None:
    return None if written is None else Entry.of(json.dumps(written).encode(), "cache").choice
