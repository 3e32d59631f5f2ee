"""What cuts cost: seconds of compiling and of computing one model whole, cut for DDP, for a plan, and finely; Markdown.

python benchmarks/compiling.py resnet50 [--batch N] [--caches FOLDER]

The model is one of the zoo, or module:function, where function(batch, device) returns a model and its loss. All ways
compile side by side, each in a process with empty caches; when all have compiled, each is timed alone. With --caches
what they compiled is added to this folder of torch's.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from torch import nn

PARTS = 5  # of a usual plan
WAYS = {
    "whole": "in one part",
    "ddp": "cut as for DDP, every 25 MiB",
    "plan": f"cut for a plan of {PARTS} buckets of about as many bytes",
    "fine": "cut finely, as DataParallel does first",
}
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # and ends its processes
    with TemporaryDirectory(prefix="anabranch-compiling-") as folder, ThreadPoolExecutor(len(WAYS)) as threads:
        processes = {way: _start(way, f"{folder}/{way}") for way in WAYS}
        try:
            for compiling in as_completed([threads.submit(_wait_for, *one) for one in processes.items()]):
                compiling.result()  # raises at once what went wrong in any
            found = {way: _timed(way, process) for way, process in processes.items()}
        finally:
            for process in processes.values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with the processes in which inductor compiles
                process.wait()
        if given.caches is not None:
            for way in WAYS:  # without Triton's own cache, which names files by their place
                shutil.copytree(
                    f"{folder}/{way}", given.caches, dirs_exist_ok=True, ignore=shutil.ignore_patterns("triton")
                )
    report(given.model, given.batch, found)


def _start(way: str, caches: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--way", way],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _wait_for(way: str, process: "subprocess.Popen[str]") -> None:
    """Return when this process has compiled its model."""
    assert process.stdout is not None
    for line in process.stdout:
        if line == f"{COMPILED}\n":
            return
    raise SystemExit(f"the process that compiles {WAYS[way]} has failed with exit code {process.wait()}")


def _timed(way: str, process: "subprocess.Popen[str]") -> dict[str, float]:
    """What a process finds, whose turn it is."""
    said, _ = process.communicate("go\n")
    if process.returncode:
        raise SystemExit(f"the process that was compiled {WAYS[way]} has failed with exit code {process.returncode}")
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def compiled(model: str, batch: int | None, way: str) -> dict[str, float]:
    """Compile a model in one of these ways; parts, seconds of the first step, and of a later one."""
    from anabranch.ddp.compiled.graphs import CompiledGraphs
    from anabranch.ddp.reducer import compiled_as_ddp
    from anabranch.tools.bench.compiled import CountingBackend, start_compiler
    from anabranch.tools.bench.zoo import model_and_loss
    from anabranch.tools.cli.user_function import load_function

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if ":" in model:
        net, loss = load_function(model, "module:function")(batch or 8, device)
    else:
        net, loss = model_and_loss(model, device, batch)
    start_compiler(device)
    wrapper, backend = Wrapper(), CountingBackend()
    if way in ("plan", "fine"):
        graphs = CompiledGraphs(dict(net.named_parameters()))
        graphs.install(net)
        if way == "plan":
            graphs.cut_for(even_parts(net))
        wrapper._graph_cutter = graphs  # type: ignore[assignment]
    called = torch.compile(net, backend=backend)
    steps_s = []
    for number in range(1 + WARM_STEPS + STEPS):
        if number == 1:
            print(COMPILED, flush=True)
            if not sys.stdin.readline():  # until all have compiled, and it is this one's turn
                raise SystemExit("another process has failed")
        began_s = perf_counter()
        net.zero_grad(set_to_none=True)
        with nullcontext() if way == "whole" else compiled_as_ddp(wrapper):
            loss(called).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        steps_s.append(perf_counter() - began_s)
    return {"parts": backend.graphs, "first_s": steps_s[0], "step_s": median(steps_s[1 + WARM_STEPS :])}


def even_parts(net: nn.Module) -> list[list[str]]:
    """Names of parameters in ``PARTS`` parts of about as many bytes, in the order of backward."""
    parts: list[list[str]] = [[] for _ in range(PARTS)]
    sizes = {name: parameter.nbytes for name, parameter in net.named_parameters()}
    before = 0
    for name, nbytes in reversed(sizes.items()):
        parts[before * PARTS // sum(sizes.values())].append(name)
        before += nbytes
    return [part for part in parts if part]


def report(model: str, batch: int | None, found: dict[str, dict[str, float]]) -> None:
    """Print a table, with whatever its figures depend on."""
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else f"CPU, {platform.machine()}"
    print(f"# Compiling {model} in parts\n\nBatch: {batch or 'default'}.\n")
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
