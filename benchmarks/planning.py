"""How long planning takes, and how far `lanes` is from brute force: prints a Markdown report."""

import platform
import random
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

import anabranch as ab
from anabranch.planning import PLANNERS
from anabranch.planning.simulator import finish_s
from anabranch.tools.network_presets import NetworkRange
from anabranch.tools.predict.scaling.prediction import planned, sweep

KIB = 1 << 10


def main() -> None:
    """Print the report."""
    versions = f"Python {platform.python_version()}, numpy {np.__version__}, anabranch {ab.__version__}"
    print(f"# Planning time and quality\n\n{datetime.now(UTC).date()}, {_processor()}, one core, {versions}.")
    print("Median of 7 runs [fastest, slowest].\n")
    print("## `optimal`\n\n| tensors | cost curve | buckets | ms |\n|---|---|---|---|")
    growth: dict[str, list[tuple[int, float]]] = {"line": [], "18 points": []}
    for numel in (150, 600, 2_400, 10_000):
        trace = random_trace(numel)
        for label, network in (("line", line()), ("18 points", curve())):
            plan, times = timed(lambda trace=trace, network=network: ab.planners.optimal(trace, network))
            print(f"| {numel:,} | {label} | {len(plan)} | {_ms(times)} |")
            growth[label].append((numel, median(times)))
    for label, points in growth.items():
        (few, few_s), (many, many_s) = points[0], points[-1]
        power = np.log(many_s / few_s) / np.log(many / few)
        print(f"\nGrowth from {few} to {many:,} tensors, {label}: as n to the power {power:.2f}.")
    print("\n## The other planners, 600 tensors, line\n\n| planner | buckets | lanes | ms |\n|---|---|---|---|")
    trace = random_trace(600)
    for name, planner in PLANNERS.items():
        plan, times = timed(lambda planner=planner: planner(trace, line(eta=0.5)))
        print(f"| {name} | {len(plan)} | {plan.lanes} | {_ms(times)} |")
    sizes = [4 << k for k in range(10)]
    links = NetworkRange.given("line", line(eta=0.5), "")
    strategies = {name: planned(planner) for name, planner in PLANNERS.items()}
    _, times = timed(lambda: list(sweep(trace, links, sizes, strategies)), 3)
    print(f"\n## Sweep\n\n{len(sizes)} world sizes × {len(PLANNERS)} planners × 600 tensors: {_ms(times)} ms.")
    print(f"\n## `lanes` against brute force\n\n{gap()}")


def random_trace(numel: int) -> ab.Trace:
    """Sizes spread evenly over their logarithm, 40 MB to 80 MB in all, backward of 200 ms."""
    rng = random.Random(3)
    top = 5.8 if numel <= 600 else 5.8 - np.log10(numel / 600)
    ready_s, tensors = 0.0, []
    for index in range(numel):
        ready_s += rng.random() * 0.4 / numel
        tensors.append(ab.TensorSpec(f"t{index}", int(10 ** rng.uniform(1.5, top)), 4, ready_s))
    return ab.Trace(tuple(tensors), 0.1)


def line(eta: float = 1.0) -> ab.Network:
    """About 10 Gbit/s among 16 ranks."""
    return ab.Network.ring(16, 2e-5, 8e-10, eta=eta)


def curve() -> ab.Network:
    """The same with measured-looking noise."""
    rng = random.Random(4)
    straight = line()
    sizes = [KIB << k for k in range(18)]
    return ab.Network.measured(16, [(n, straight.allreduce_s(n) * (1 + 0.2 * rng.random())) for n in sizes])


def timed(action, repeats: int = 7):  # type: ignore[no-untyped-def]
    """The result of an action and its times in seconds."""
    times = []
    for _ in range(repeats):
        start = perf_counter()
        result = action()
        times.append(perf_counter() - start)
    return result, times


def gap(cases: int = 200) -> str:
    """How much later the plans of `lanes` finish than the best of all partitions on all of 3 lanes."""
    rng = random.Random(5)
    gaps = []
    for _ in range(cases):
        trace, network = _small(rng)
        best = min(finish_s(trace, plan, network) for plan in _all_plans(trace, 3))
        gaps.append(finish_s(trace, ab.planners.lanes(trace, network, lanes=3), network) / best - 1)
    exact = sum(g < 1e-9 for g in gaps)
    return (
        f"{cases} random traces of 2 to 6 tensors, η from 0 to 1, all partitions × 3 lanes: "
        f"best plan found in {exact}, mean gap {np.mean(gaps):.2%}, worst {max(gaps):.1%}."
    )


def _small(rng: random.Random) -> tuple[ab.Trace, ab.Network]:
    ready_s, tensors = 0.0, []
    for index in range(rng.randint(2, 6)):
        ready_s += rng.random() * 4
        tensors.append(ab.TensorSpec(f"t{index}", rng.choice([1, 2, 4, 8, 16]), 1, ready_s))
    network = ab.Network.linear(4, rng.random() * 4, rng.random(), eta=rng.choice([0, 0.25, 0.5, 0.75, 1]))
    return ab.Trace(tuple(tensors), 1.0), network


def _all_plans(trace: ab.Trace, lanes: int):  # type: ignore[no-untyped-def]
    for mask in range(1 << (len(trace) - 1)):
        plan = ab.Plan.from_cuts(trace, [i + 1 for i in range(len(trace) - 1) if mask >> i & 1])
        for assignment in product(range(lanes), repeat=len(plan)):
            yield ab.Plan(tuple(ab.Bucket(b.names, lane) for b, lane in zip(plan.buckets, assignment, strict=True)))


def _ms(times: list[float]) -> str:
    return f"{median(times) * 1e3:.1f} [{min(times) * 1e3:.1f}, {max(times) * 1e3:.1f}]"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
