"""A folder as a run leaves it behind: one file of every kind that a report draws."""

import json
from pathlib import Path
from typing import Any

from anabranch import Network, Span, Timeline, Trace, save, simulate
from anabranch import planning as planners
from anabranch.tools.cli.main import main
from anabranch.tools.predict.scaling.result import NetworkUsed, ScalePoint, Scaling, Strategy
from anabranch.tools.report.documents import BenchDocument, Benchmark, BenchmarkRow, Document, printed
from tools.cli.nouns import measured, small_trace

GIB = 1 << 30


def measured_step(trace: Trace, network: Network) -> Timeline:
    """What the simulator says of the exact plan, a little slower."""
    timeline = simulate(trace, planners.optimal(trace, network), network)
    spans = [Span(span.track, span.name, 1.05 * span.start_s, 1.05 * span.end_s) for span in timeline.spans]
    return Timeline(tuple(spans), {"source": "measured"})


def metrics_line(step: int, stage: str = "running optimal") -> dict[str, Any]:
    """As ``ab.JsonLines`` writes it; step 7 took longest."""
    took_s = 0.2 if step == 7 else 0.08 + step % 5 * 1e-4
    return {
        "step": step, "rank": 0, "measured_s": took_s, "predicted_s": 0.079, "compute_s": 0.06, "exposed_s": 0.02,
        "overlap": 0.5, "sent_nbytes": 1 << 20, "received_nbytes": 1 << 20, "density": 0.01, "plan": "abc123",
        "buckets": 4, "lanes": 1, "stage": stage,
    }  # fmt: skip


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def as_json(document: Document) -> dict[str, Any]:
    """What a command prints, as another program reads it."""
    read: dict[str, Any] = json.loads(json.dumps(printed(document)))
    return read


def scaling_document(model: str = "densenet", strategy: str = "optimal") -> dict[str, Any]:
    """What scale --json prints, of one network and two strategies."""
    points = tuple(
        ScalePoint("10gbe", name, size, 4, 1, slow * size, 0.8 * slow * size, 1.5 * slow * size, 0.1, 2.0, 0.5)
        for size in (4, 16)
        for name, slow in (("by_bytes", 0.02), (strategy, 0.01))
    )
    found = Scaling(
        model, "weak", (NetworkUsed("10gbe", "published", "half to twice", "a ring"),),
        (Strategy("by_bytes", "dense"), Strategy(strategy, "dense")), points, answer=("10gbe: it helps.",),
    )  # fmt: skip
    return as_json(found)


def memory_document(model: str = "bert-large", kind: str = "gradients") -> dict[str, Any]:
    """What memory --json prints."""
    kinds = {"parameters": GIB, kind: GIB, "activations": 3 * GIB}
    modes = {mode: {"kinds": kinds, "predicted_nbytes": 5 * GIB, "at": "backward"} for mode in ("ddp", "lean")}
    return {
        "command": "memory", "model": model, "batch_size": 8, "ranks": 4, "density": 0.01, "optimizer": "adamw",
        "activations": "keep", "assumptions": ["float32"], "modes": modes, "within_nbytes": None,
        "largest_batch": {"ddp": 8, "lean": 12},
    }  # fmt: skip


def bench_document(model: str = "resnet50", name: str = "DataParallel") -> dict[str, Any]:
    """What bench --json prints."""
    rows = (BenchmarkRow("DDP", (0.1, 0.11)), BenchmarkRow(name, (0.085, 0.095), 0.088))
    found = Benchmark(model, 32, "images", 4, rows, 0.08, f"running {name}", {"date": "2026-11-15"})
    return as_json(BenchDocument(benchmarks=(found,)))


def planned_document(name: str = "layer") -> dict[str, Any]:
    """What simulate --json prints."""
    bucket = {"index": 0, "lane": 1, "collective": "dense", "tensors": 1, "nbytes": 8, "ready_s": 0.1, "start_s": 0.1,
              "end_s": 0.3, "names": [f"{name}.0"], "sent_nbytes": 12, "scatter": None, "gather": None}  # fmt: skip
    return {"command": "simulate", "plan": None, "planner": "optimal", "world_size": 8, "fingerprint": "ab", "lanes": 2,
            "forward_s": 0.1, "backward_s": 0.2, "finish_s": 0.3, "communication_s": 0.2, "exposed_s": 0.1,
            "overlap": 0.5, "iteration_s": 0.4, "buckets": [bucket], "written": []}  # fmt: skip


def window_document(name: str = "layer") -> dict[str, Any]:
    """What model.trace_steps writes: two ranks, steps 4 and 5."""
    events: list[dict[str, Any]] = []
    for rank in (0, 1):
        for track, words in enumerate(("compute", "gradients ready", "lane 0")):
            args = {"name": words}
            events.append({"ph": "M", "pid": rank, "tid": track, "ts": 0, "name": "thread_name", "args": args})
        for step in (4, 5):
            at, own = 1e5 * step + 10 * rank, {"step": step}
            events += [
                {"ph": "X", "pid": rank, "tid": 0, "name": "forward", "ts": at, "dur": 2e4, "args": own},
                {"ph": "X", "pid": rank, "tid": 0, "name": "backward", "ts": at + 2e4, "dur": 4e4, "args": own},
                {"ph": "X", "pid": rank, "tid": 2, "name": f"bucket 0: dense, 1 tensors, {name}.0", "ts": at + 3e4,
                 "dur": 4e4, "args": {**own, "tensors": [f"{name}.0"], "nbytes": 8}},
                {"ph": "X", "pid": rank, "tid": 0, "name": "exposed communication", "ts": at + 6e4, "dur": 1e4,
                 "args": own},
                {"ph": "i", "s": "t", "pid": rank, "tid": 1, "name": f"{name}.0", "ts": at + 3e4, "args": own},
            ]  # fmt: skip
    return {"displayTimeUnit": "ms", "otherData": {"made_by": "anabranch"}, "traceEvents": events}


def run_folder(folder: Path, name: str = "layer", steps: int = 40, tensors: int = 20) -> Path:
    """Everything; ``name`` is in every place where a file may put one."""
    folder.mkdir(parents=True, exist_ok=True)
    trace, network = small_trace(name, tensors), measured()
    save(trace, folder / "trace.json")
    save(network, folder / "network.json")
    save(planners.optimal(trace, network), folder / "plan.json")
    save(measured_step(trace, network), folder / "timeline.json")
    write_lines(folder / "metrics.jsonl", [metrics_line(step, f"running {name}") for step in range(1, steps + 1)])
    write_lines(folder / "losses.jsonl", [{"step": step, "loss": 5 / step} for step in range(1, steps + 1)])
    documents = {
        "scale": scaling_document(name, name), "memory": memory_document(name, name), "window": window_document(name),
        "bench": bench_document(name, name), "compare": comparison_document(name),
    }  # fmt: skip
    for stem, document in documents.items():
        (folder / f"{stem}.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def comparison_document(name: str = "optimal") -> dict[str, Any]:
    """What compare --json prints."""
    times = {"per_tensor": 0.3, "by_bytes": 0.05, name: 0.04, "single": 0.125}
    rows: list[dict[str, Any]] = [
        {"name": planner, "planner": planner, "options": {}, "fingerprint": "ab", "buckets": 1, "lanes": 1,
         "finish_s": took_s, "exposed_s": took_s / 2, "iteration_s": took_s, "speedup": 0.05 / took_s,
         "lower_bound_s": 0.04, "above_bound": took_s / 0.04 - 1, "iteration_low_s": None, "iteration_high_s": None,
         "kinds": {"dense": 1.0}, "error": 0.0}
        for planner, took_s in times.items()
    ]  # fmt: skip
    compressed = [
        {**rows[2], "name": "auto", "planner": "least_lossy", "finish_s": 0.02, "iteration_s": 0.03,
         "above_bound": -0.5, "kinds": {"dense": 0.25, "int8": 0.75}, "error": 0.75 * 81e-6}
    ]  # fmt: skip
    return {"command": "compare", "trace": name, "network": "10gbe", "world_size": 8, "forward_s": 0.02,
            "backward_s": 0.04, "best": name, "rows": rows, "compressed": compressed,
            "assumptions": ["int8 computes"]}  # fmt: skip


def written_page(folder: Path, output: Path) -> str:
    """The page that the command makes of a folder."""
    assert main(["report", str(folder), "-o", str(output), "--title", "A run"]) == 0
    return output.read_text(encoding="utf-8")
