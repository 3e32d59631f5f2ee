"""How long `anabranch report` takes on a long run of a large model, and how large its page is: prints Markdown."""

import json
import platform
import random
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import plotly

import anabranch as ab

STEPS, TIMES = 10_000, 5
MODELS = ("resnet50", "densenet201")


def main() -> None:
    """Print the report."""
    versions = f"Python {platform.python_version()}, plotly {plotly.__version__}, anabranch {ab.__version__}"
    print(f"# One page of {STEPS:,} steps\n\n{datetime.now(UTC).date()}, {platform.machine()}, two cores, {versions}.")
    print(f"The whole command, median of {TIMES} runs [fastest, slowest]; targets: 10 s and 20 MB.\n")
    print("| model | tensors | buckets | files | seconds | page, MB |\n|---|---|---|---|---|---|")
    for model in MODELS:
        for planner in ("optimal", "per_tensor"):
            with TemporaryDirectory() as folder:
                print(row(model, planner, Path(folder)))


def row(model: str, planner: str, folder: Path) -> str:
    """One line of the table."""
    run, page = folder / "run", folder / "report.html"
    tensors, buckets = write(run, model, planner)
    command = [sys.executable, "-m", "anabranch", "report", str(run), "-o", str(page), "--force"]
    times = []
    for _ in range(TIMES):
        begun = perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(perf_counter() - begun)
    spread = f"{median(times):.2f} [{min(times):.2f}, {max(times):.2f}]"
    return (
        f"| {model} | {tensors} | {buckets} | {len(list(run.iterdir()))} | {spread} | {page.stat().st_size / 1e6:.2f} |"
    )


def write(run: Path, model: str, planner: str) -> tuple[int, int]:
    """What a training of this model would leave behind; how many tensors it has, and how many buckets."""
    run.mkdir()
    trace = ab.load(Path(ab.__file__).parent / "values" / "traces" / f"{model}.json")
    assert isinstance(trace, ab.Trace)
    network = ab.Network.ring(16, alpha_s=30e-6, beta_s_per_byte=8e-10)
    plan = getattr(ab.planners, planner)(trace, network)
    timeline = ab.simulate(trace, plan, network)
    measured = ab.Timeline(timeline.spans, {"source": "measured"})
    for name, noun in {"trace": trace, "network": network, "plan": plan, "timeline": measured}.items():
        ab.save(noun, run / f"{name}.json")
    chance = random.Random(0)
    with (run / "run.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, STEPS + 1):
            took_s = timeline.iteration_s * chance.lognormvariate(0, 0.05)
            line = {
                "step": step, "rank": 0, "measured_s": took_s, "predicted_s": timeline.iteration_s, "compute_s": took_s,
                "exposed_s": timeline.exposed_s, "overlap": timeline.overlap, "sent_nbytes": trace.nbytes,
                "received_nbytes": trace.nbytes, "density": chance.random(), "plan": plan.fingerprint[:12],
                "buckets": len(plan), "lanes": 1, "stage": "running", "loss": 5 / step + chance.random(),
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")
    return len(trace), len(plan)


if __name__ == "__main__":
    main()
