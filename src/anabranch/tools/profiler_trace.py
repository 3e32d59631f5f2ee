"""A Trace from a Chrome trace of torch.profiler.

Such a file tells when a gradient's AccumulateGrad ran, and with ``record_shapes=True`` its shape and dtype; it does not
tell which parameter that was. On a GPU the host only launches: a gradient is ready when the last kernel
that was launched before its AccumulateGrad ended has ended.
"""

import gzip
import json
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from anabranch.values.checks import Scalar
from anabranch.values.errors import FileError
from anabranch.values.files import brief
from anabranch.values.trace import TensorSpec, Trace

MAX_NBYTES = 512 << 20  # as JSON: some millions of events, and as many gigabytes of memory as one would give
ENGINE = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
DTYPES: Mapping[str, tuple[str, int]] = {
    "float": ("float32", 4), "double": ("float64", 8), "c10::half": ("float16", 2), "half": ("float16", 2),
    "c10::bfloat16": ("bfloat16", 2), "bfloat16": ("bfloat16", 2),
}  # fmt: skip
HOW = "profile a few steps with torch.profiler.profile(record_shapes=True) and export_chrome_trace"
MICRO = 1e-6
LATEST = 1e18  # microseconds: past this an instant is no instant


class ProfilerEvent(NamedTuple):
    """An event with a duration; times in microseconds."""

    name: str
    kind: str
    thread: tuple[Any, Any]
    start: float
    end: float
    args: Mapping[str, Any]


class Gradient(NamedTuple):
    """A gradient and the host time at which it was ready."""

    numel: int
    dtype: str
    shape: str
    host: float


class Pass(NamedTuple):
    """One forward and backward, in host time."""

    forward: float
    backward: float
    gradients: Sequence[Gradient]


def load_profiler_trace(path: Path, model: str | None = None, batch: int | None = None) -> Trace:
    """The median step in the file; FileError, saying what is missing, if it does not hold one.

    Forward is taken to begin with the first operation that autograd recorded, so it includes the loss. Gradients are
    numbered in the order of backward. ``meta`` says what was assumed, and what is not known.
    """
    document = _parsed(path)
    raw = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(raw, list):
        raise FileError(f"{path}: 'traceEvents' is {brief(raw)}, expected a list of events, as torch.profiler writes")
    events = _events(raw, str(path))
    passes = _passes(events, str(path))
    clock = _device_clock(events)
    kinds = [tuple((gradient.numel, gradient.dtype) for gradient in one.gradients) for one in passes]
    usual = Counter(kinds).most_common(1)[0][0]
    alike = [one for one, kind in zip(passes, kinds, strict=True) if kind == usual]
    other = f"; {len(passes) - len(alike)} more had other gradients and were left out" if alike != passes else ""
    meta: dict[str, Scalar] = {
        **_origin(document),
        "steps": len(alike),
        "assumed": "forward begins with the first operation that autograd recorded; every backward is a step" + other,
        "instants": "ends of kernels launched before" if clock else "ends of AccumulateGrad on the host",
        "not_known": "the names of parameters, so a plan from this trace cannot run on a model; what profiling cost",
        "imported_from": path.name,
        **({"model": model} if model is not None else {}),
        **({"batch": batch} if batch is not None else {}),
    }
    try:
        return _trace(alike, clock or (lambda host: host), meta)
    except ValueError as error:  # such as a gradient of more bytes than there are
        raise FileError(f"{path}: {error}") from error


def _trace(passes: Sequence[Pass], clock: Callable[[float], float], meta: Mapping[str, Scalar]) -> Trace:
    """Medians over the passes, with the interquartile range of each instant."""
    ready = [[clock(g.host) - clock(one.backward) for g in one.gradients] for one in passes]
    forward = [clock(one.backward) - clock(one.forward) for one in passes]
    tensors = []
    for index, gradient in enumerate(passes[0].gradients):
        instants = [max(0.0, MICRO * row[index]) for row in ready]
        name, itemsize = DTYPES[gradient.dtype]
        low, _, high = quantiles(instants, n=4, method="inclusive") if len(instants) > 1 else (0.0, 0.0, 0.0)
        label = f"gradient {index} {gradient.shape}"
        tensors.append(TensorSpec(label, gradient.numel, itemsize, median(instants), name, high - low))
    tensors.sort(key=lambda tensor: tensor.ready_s)
    return Trace(tuple(tensors), max(0.0, MICRO * median(forward)), meta)


def _parsed(path: Path) -> Any:
    """The JSON of the file, decompressed if it is a .gz; FileError if that is more than ``MAX_NBYTES``."""
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_packed else path.open("rb") as file:
            content = file.read(MAX_NBYTES + 1)
    except (EOFError, zlib.error, OSError, ValueError) as error:  # of a .gz file that is not whole, the first ones
        what = getattr(error, "strerror", None) or error
        raise FileError(f"{path}: cannot be read ({what}); is the file whole?") from error
    if len(content) > MAX_NBYTES:
        raise FileError(f"{path}: has more than {MAX_NBYTES >> 20} MiB of JSON; profile fewer steps, five are plenty")
    try:
        return json.loads(content)
    except (RecursionError, ValueError) as error:  # JSONDecodeError, UnicodeDecodeError; nested too deeply
        raise FileError(f"{path}: is not valid JSON: {str(error)[:200]}; is the file whole?") from error


def _events(raw: Iterable[Any], where: str) -> list[ProfilerEvent]:
    """The events with a duration, by their start."""
    events = []
    for index, event in enumerate(raw):
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        times = [event.get("ts"), event.get("dur", 0)]
        if not all(isinstance(at, int | float) and abs(at) < LATEST for at in times) or times[1] < 0:
            found = f"ts {brief(times[0])} and dur {brief(event.get('dur'))}"
            raise FileError(f"{where}: event {index} has {found}, expected microseconds as two finite numbers")
        start, end = float(times[0]), float(times[0] + times[1])
        args = event.get("args")
        thread = (str(event.get("pid")), str(event.get("tid")))
        name, kind = str(event.get("name", "")), str(event.get("cat", ""))
        events.append(ProfilerEvent(name, kind, thread, start, end, args if isinstance(args, dict) else {}))
    return sorted(events, key=lambda event: (event.start, -event.end))


def _passes(events: Sequence[ProfilerEvent], where: str) -> list[Pass]:
    """A backward is a run of autograd's nodes that no operation of a forward interrupts."""
    nodes = [event for event in events if event.name.startswith(ENGINE)]
    if not nodes:
        raise FileError(f"{where}: has no backward of torch in it (no event {ENGINE.strip()!r}); {HOW}")
    forward = _forward(events, nodes)
    runs: list[list[ProfilerEvent]] = [[nodes[0]]]
    for before, after in pairwise(nodes):
        if bisect_left(forward, after.start) > bisect_right(forward, before.start):
            runs.append([])
        runs[-1].append(after)
    starts = [event.start for event in events]
    found, previous = [], float("-inf")
    for run in runs:
        begin, end = run[0].start, max(event.end for event in run)
        at = bisect_right(forward, previous)
        started = forward[at] if at < len(forward) and forward[at] < begin else begin
        inside = events[bisect_left(starts, begin) : bisect_right(starts, end)]
        if gradients := [_gradient(event, where) for event in inside if event.name == ACCUMULATE]:
            found.append(Pass(started, begin, gradients))
        previous = end
    if not found:
        raise FileError(f"{where}: has a backward, but no gradient of a parameter in it ({ACCUMULATE}); {HOW}")
    return found


def _forward(events: Sequence[ProfilerEvent], nodes: Sequence[ProfilerEvent]) -> list[float]:
    """When operations that autograd recorded began, but for those that a backward computes again."""
    own: dict[tuple[Any, Any], list[ProfilerEvent]] = {}
    for node in nodes:
        own.setdefault(node.thread, []).append(node)
    starts = {thread: [node.start for node in mine] for thread, mine in own.items()}
    until = {thread: list(accumulate((node.end for node in mine), max)) for thread, mine in own.items()}
    found = []
    for event in events:
        if event.kind == "cpu_op" and "Sequence number" in event.args and not event.args.get("Fwd thread id"):
            at = bisect_right(starts.get(event.thread, []), event.start) - 1
            if at < 0 or event.start >= until[event.thread][at]:
                found.append(event.start)
    return found


def _gradient(event: ProfilerEvent, where: str) -> Gradient:
    """What an AccumulateGrad made ready."""
    shape, name = _first(event, "Input Dims"), _first(event, "Input type")
    if shape is None:
        raise FileError(f"{where}: its gradients have no shapes, so their sizes are unknown; {HOW}")
    if not isinstance(shape, list) or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape):
        raise FileError(f"{where}: a gradient has the shape {brief(shape)}, expected a list of whole numbers")
    if (dtype := str(name).lower()) not in DTYPES:
        raise FileError(f"{where}: a gradient has the type {brief(name)}, expected one of {', '.join(DTYPES)}")
    return Gradient(prod(shape), dtype, str(shape), event.end)


def _first(event: ProfilerEvent, what: str) -> Any:
    values = event.args.get(what)
    return values[0] if isinstance(values, list) and values else None


def _device_clock(events: Sequence[ProfilerEvent]) -> Callable[[float], float] | None:
    """From an instant of the host to when the device has done what was launched before it; None without a device.

    NCCL's kernels are not computation; they are on streams of their own, and left out.
    """
    known = [(event, number) for event in events if isinstance(number := event.args.get("correlation"), int | str)]
    launched = {number: event.start for event, number in known if event.kind in LAUNCHES}
    work = sorted(
        (launched[number], event.end)
        for event, number in known
        if event.kind in ON_DEVICE and number in launched and not event.name.lower().startswith("nccl")
    )
    if not work:
        return None
    hosts = [host for host, _ in work]
    done = list(accumulate((end for _, end in work), max))

    def clock(host: float) -> float:
        at = bisect_right(hosts, host) - 1
        return max(host, done[at]) if at >= 0 else host  # an idle device has done it all by then

    return clock


def _origin(document: Any) -> dict[str, Scalar]:
    """What the file says about where it was recorded."""
    found: dict[str, Scalar] = {"made_by": "torch.profiler"}
    match document:
        case {"deviceProperties": [{"name": str(device)}, *_]}:
            found["device"] = device[:80]
    match document:
        case {"distributedInfo": {"rank": int(rank), "world_size": int(world_size)}}:
            found |= {"rank": rank, "world_size": world_size}
    return found
