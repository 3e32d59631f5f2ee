"""What cuts cost: seconds of compiling, and of computing, one model whole, cut as for DDP, and finely; prints Markdown.

python benchmarks/compiling.py resnet50 [--batch N] [--caches FOLDER]

The three compile side by side, each in a process with empty caches; when all have compiled, each is timed alone. With
--caches what they compiled is added to this folder of torch's.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from contextlib import nullcontext
from datetime import UTC, datetime
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

WAYS = {"whole": "in one part", "ddp": "cut as for DDP, every 25 MiB", "fine": "cut finely, as DataParallel does first"}
WARM_STEPS, STEPS = 5, 20
COMPILED = "compiled"  # what a process says
DDP_NBYTES = 25 << 20


class Wrapper:
    """What torch asks about a DistributedDataParallel whose forward it compiles."""

    bucket_bytes_cap = DDP_NBYTES
    _graph_cutter = None


def main() -> None:
    """Start a process for each way, and print a table of what they found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--caches")
    parser.add_argument("--way", choices=WAYS)
    given = parser.parse_args()
    if given.way is not None:
        print(json.dumps(compiled(given.model, given.batch, given.way)))
        return
    with TemporaryDirectory(prefix="anabranch-compiling-") as folder:
        processes = {
            way: subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--way", way],
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/{way}"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for way in WAYS
        }
        for process in processes.values():
            while (line := _line_of(process)) != COMPILED:
                print(line)
        found = {way: json.loads(process.communicate("go\n")[0].splitlines()[-1]) for way, process in processes.items()}
        if given.caches is not None:
            for way in WAYS:  # without Triton's own cache, which names files by their place
                shutil.copytree(
                    f"{folder}/{way}", given.caches, dirs_exist_ok=True, ignore=shutil.ignore_patterns("triton")
                )
    report(given.model, found)


def _line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a process ended before its model was compiled, with exit code {process.wait()}")
    return line.rstrip("\n")


def compiled(model: str, batch: int | None, way: str) -> dict[str, float]:
    """Compile a model in one of these ways; parts, seconds of the first step, and of a later one."""
    from anabranch.bench.compiled import CountingBackend, start_compiler
    from anabranch.bench.zoo import model_and_step
    from anabranch.compiled.graphs import CompiledGraphs
    from anabranch.ddp.reducer import compiled_as_ddp

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net, step = model_and_step(model, device, None, batch)
    start_compiler(device)
    wrapper, backend = Wrapper(), CountingBackend()
    if way == "fine":
        graphs = CompiledGraphs(dict(net.named_parameters()))
        graphs.install(net)
        wrapper._graph_cutter = graphs  # type: ignore[assignment]
    called = torch.compile(net, backend=backend)
    steps_s = []
    for number in range(1 + WARM_STEPS + STEPS):
        if number == 1:
            print(COMPILED, flush=True)
            sys.stdin.readline()  # until all have compiled, and it is this one's turn
        began_s = perf_counter()
        with nullcontext() if way == "whole" else compiled_as_ddp(wrapper):
            step(called)  # type: ignore[arg-type]
        if device.type == "cuda":
            torch.cuda.synchronize()
        steps_s.append(perf_counter() - began_s)
    return {"parts": backend.graphs, "first_s": steps_s[0], "step_s": median(steps_s[1 + WARM_STEPS :])}


def report(model: str, found: dict[str, dict[str, float]]) -> None:
    """Print a table, with whatever its figures depend on."""
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else f"CPU, {platform.machine()}"
    print(f"# Compiling {model} in parts\n")
    print(f"{datetime.now(UTC).date()}, torch {torch.__version__}, {device}, {os.cpu_count()} cores; caches empty at")
    print(f"first; {len(found)} processes compile side by side, and are timed one after the other.\n")
    print("| | parts | first step, s | of one part | later step, ms | of one part |")
    print("|---|---:|---:|---:|---:|---:|")
    whole = found["whole"]
    for way, words in WAYS.items():
        one = found[way]
        longer, slower = one["first_s"] / whole["first_s"], one["step_s"] / whole["step_s"]
        print(
            f"| {words} | {one['parts']:.0f} | {one['first_s']:.1f} | {longer:.2f} | {one['step_s'] * 1e3:.2f} | "
            f"{slower:.2f} |"
        )


if __name__ == "__main__":
    main()
