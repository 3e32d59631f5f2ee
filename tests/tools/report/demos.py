"""A demo's document, made up: six ways to train on slow links."""

from collections.abc import Mapping
from typing import Any

from anabranch.tools.report.documents import Benchmark, BenchmarkRow, DemoDocument, DemoTraining
from tools.report.run_files import as_json

SLOW_S = {
    "compute only": 0.02, "DDP": 0.2, "DataParallel": 0.2, "int8": 0.08, "Ok-Topk 10 %": 0.1, "Ok-Topk 1 %": 0.05,
    "auto": 0.08,
}  # fmt: skip
STEPS = 40


def benchmark(steps_s: Mapping[str, float], network: str) -> Benchmark:
    """Rows of three turns."""
    rows = tuple(
        BenchmarkRow(
            name, (step_s, 1.1 * step_s, step_s), 0.9 * step_s if name != "compute only" else None,
            buckets=3 if name not in ("compute only", "DDP") else None,
        )
        for name, step_s in steps_s.items()
    )  # fmt: skip
    return Benchmark("googlenet", 4, "seq", 2, rows, 0.02, "explained", {"network": network, "date": "2026-11-16"})


def training(name: str, step_s: float, higher: float = 0.0, steps: int = STEPS) -> DemoTraining:
    """A loss that falls by 0.05 a step, and ``higher`` than DDP's."""
    return DemoTraining(
        name=name,
        code=f"wrap(model, {name}, {'long_' * 20})",
        losses=tuple(5.0 - 0.05 * step + higher for step in range(steps)),
        elapsed_s=tuple(step_s * (step + 1) for step in range(steps)),
        memory={"parameters": 1 << 20, "residuals": 1 << 19 if name.startswith("Ok-Topk") else 0},
        chosen="" if name == "DDP" else f"{name} was chosen",
        explanation="" if name == "DDP" else f"explained {name}",
    )


def demo(
    steps_s: Mapping[str, float] = SLOW_S, link: str = "2 hosts, 100 Mbit/s links", **changed: Any
) -> DemoDocument:
    """The whole document; Ok-Topk 1 % loses much, and the compressed ways train twice as many steps."""
    higher = {"Ok-Topk 1 %": 0.3}
    trainings = tuple(
        training(name, step_s, higher.get(name, 0.0), STEPS if name.startswith("D") else 2 * STEPS)
        for name, step_s in steps_s.items()
        if name != "compute only"
    )
    fields: dict[str, Any] = {
        "link": link,
        "parameters": 437_888,
        "benchmark": benchmark(steps_s, link),
        "trainings": trainings,
    }
    return DemoDocument(**{**fields, **changed})


def demo_document(**changed: Any) -> dict[str, Any]:
    """What demo --json prints."""
    return as_json(demo(**changed))
