"""DataParallel where several ranks share a network card, beside DDP: steps, and bytes through a card; prints Markdown.

    python -m benchmarks.nodes 4x1 2x2 2x4 --rate 100mbit
    python -m benchmarks.nodes 2x8 --rate 20mbit --million 0.5

Every shape, hosts × ranks on each, is a lab of its own on Gloo, which needs root. ``anabranch bench`` races all
contestants there, in turns within one run. The model computes next to nothing, so that steps show what messages take.
2 × 4 takes about ten minutes on two cores, most of it searches. ``benchmarks/h200/nodes.sh`` does it on a GPU.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import anabranch as ab

KINDS = ("int8", "int4", "auto", "oktopk:0.01")
LAYERS = 8
LAYER_S = 1e-3  # of backward
SHAPE = re.compile(r"([1-9]\d*)x([1-9]\d*)")


def model_of(million: float) -> ab.Trace:
    """A model of so many million parameters."""
    numel = round(million * 1e6 / LAYERS)
    tensors = [ab.TensorSpec(f"layer{i}.weight", numel, 4, LAYER_S * (i + 1)) for i in range(LAYERS)]
    return ab.Trace(tuple(tensors), LAYER_S)


def race(hosts: int, ranks: int, trace: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All contestants on one shape, as ``bench --json`` prints them; progress goes to stderr."""
    lab = f"lab --hosts {hosts} --ranks-per-host {ranks} --rate {options.rate} --timeout {options.limit_s}"
    bench = ["bench", "--trace", str(trace), "--only", "fp16 hook", "--search-steps", str(options.search_steps)]
    bench += ["--num-iters", str(options.rounds), "--num-batches-per-iter", str(options.steps), "--json"]
    bench += [word for kind in options.compress for word in ("--compress", kind)]
    bench += ["--flat"] * (options.flat and ranks > 1)
    anabranch = [sys.executable, "-m", "anabranch"]
    done = subprocess.run([*anabranch, *lab.split(), "--", *anabranch, *bench], stdout=subprocess.PIPE, check=True)
    (benchmark,) = json.loads(done.stdout)["benchmarks"]
    return dict(benchmark)


def table(found: dict[str, dict[str, Any]]) -> str:
    """A row for each contestant, two columns for each shape."""
    names = list(dict.fromkeys(row["name"] for benchmark in found.values() for row in benchmark["rows"]))
    lines = [
        "| | " + " | ".join(f"{shape}: step / DDP | MB through a card (/ DDP)" for shape in found) + " |",
        "|---" + "|---:" * (2 * len(found)) + "|",
    ]
    for name in names:
        cells = [cell for benchmark in found.values() for cell in cells_of(benchmark, name)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cells_of(found: dict[str, Any], name: str) -> tuple[str, str]:
    """Of one contestant on one shape; empty where it did not race."""
    row = next((row for row in found["rows"] if row["name"] == name), None)
    if row is None:
        return "", ""
    card = "" if row["card_nbytes"] is None else f"{row['card_nbytes'] / 1e6:.2f} ({row['card_to_ddp']:.2f})"
    return f"{row['ratio_to_ddp']:.2f}", card


def shape_of(text: str) -> tuple[int, int]:
    """What "2x4" means."""
    match = SHAPE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected hosts x ranks on each, such as 2x4")
    return int(match[1]), int(match[2])


def main() -> None:
    """Race on every shape, one lab after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", type=shape_of, metavar="HOSTSxRANKS")
    parser.add_argument("--rate", default="100mbit", help="of a host's link")
    parser.add_argument("--million", type=float, default=2.1, help="parameters")
    parser.add_argument("--compress", nargs="*", default=list(KINDS), metavar="KIND", help="as of anabranch bench")
    parser.add_argument("--flat", action="store_true", help="also every DataParallel with nodes=False")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of each contestant in a round")
    parser.add_argument("--search-steps", type=int, default=50, help="of each DataParallel")
    parser.add_argument("--limit-s", type=int, default=1800, help="of each shape")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, f"{options.million:g}M.json")
        ab.save(model_of(options.million), trace)
        for hosts, ranks in options.shapes:
            found[f"{hosts} × {ranks}"] = race(hosts, ranks, trace, options)
    facts = next(iter(found.values()))["facts"]
    print(f"# {options.million:g} million parameters, {options.rate} links, computing negligible\n")
    print(f"{facts['date']}, {os.cpu_count()} cores, {facts['versions']}; {facts['measured']}\n")
    print(table(found), flush=True)


if __name__ == "__main__":
    main()
