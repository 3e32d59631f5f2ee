"""anabranch demo: a real training on this machine, under DistributedDataParallel and under DataParallel."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli.output import ForceOption, JsonOption, check_free, print_json, show_tables
from anabranch.errors import AnabranchError
from anabranch.files import write_bytes

if TYPE_CHECKING:
    from anabranch.report.documents import DemoDocument, DemoRun

FEWEST_STEPS = 75  # DataParallel needs about as many to profile, plan, try and choose
DEADLINE_S = 900
KEPT = ("trace.json", "network.json", "plan.json", "timeline.json", "run.jsonl", "demo.json")

WorkersOption = Annotated[int, typer.Option(min=2, max=64, help="Worker processes, all on this machine.")]
StepsOption = Annotated[int, typer.Option(min=FEWEST_STEPS, help="Steps of each training before both take turns.")]


KeepOption = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Keep what the run leaves behind there, for anabranch report.")
]


def demo(
    workers: WorkersOption = 4,
    steps: StepsOption = 80,
    keep: KeepOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a small transformer on this machine's CPU twice, as DDP and as DataParallel, and compare the two."""
    if keep is not None:
        check_free([keep / name for name in KEPT], force)
    if not as_json:
        print(f"{workers} workers train a small transformer on Python's own sources, twice.", flush=True)
    with TemporaryDirectory(prefix="anabranch-") as folder:
        runs = _train(workers, steps, Path(folder) / "runs.json")
        left = {name: (Path(folder) / name).read_bytes() for name in KEPT if (Path(folder) / name).exists()}
    document = _document(workers, runs)
    if keep is not None:
        _keep(keep, left, runs["anabranch"]["losses"], document)
    if as_json:
        from anabranch.report.documents import printed

        print_json(printed(document))
    else:
        _print(document)


def _document(workers: int, runs: dict[str, Any]) -> "DemoDocument":
    """What the two trainings, as ``demo/train.py`` wrote them, come to."""
    from anabranch.report.documents import DemoDocument, StepRatio

    ddp, ours = runs["ddp"], runs["anabranch"]
    ratios = quantiles(own_s / ddp_s for own_s, ddp_s in zip(ours["rounds_s"], ddp["rounds_s"], strict=True))
    return DemoDocument(
        workers=workers,
        steps=len(ddp["losses"]),
        parameters=runs["parameters"],
        runs={"DistributedDataParallel": _run(ddp), "DataParallel": _run(ours)},
        largest_loss_difference=max(abs(a - b) for a, b in zip(ddp["losses"], ours["losses"], strict=True)),
        step_ratio=StepRatio(low=ratios[0], median=ratios[1], high=ratios[2]),
        plan=runs["plan"],
        explanation=runs["explanation"],
        notes=tuple(runs["notes"]),
    )


def _run(run: dict[str, Any]) -> "DemoRun":
    from anabranch.report.documents import DemoRun

    low_s, median_s, high_s = quantiles(run["rounds_s"])
    losses = run["losses"]
    return DemoRun(first_loss=losses[0], last_loss=losses[-1], step_s=median_s, step_low_s=low_s, step_high_s=high_s)


def _keep(folder: Path, left: Mapping[str, bytes], losses: Sequence[float], document: "DemoDocument") -> None:
    """Write the files of this run to ``folder``, and remove those of an earlier run, so that none is out of date."""
    from anabranch.report.documents import printed

    lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, start=1)]
    steps = left.get("run.jsonl", b"") + "".join(lines).encode()
    files = {**left, "run.jsonl": steps, "demo.json": json.dumps(printed(document)).encode()}
    folder.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        (folder / name).unlink(missing_ok=True)
        if name in files:
            write_bytes(files[name], folder / name)


def _train(workers: int, steps: int, output: Path) -> dict[str, Any]:
    """Both trainings, by torchrun, in worker processes of one thread each."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    program = ["-m", "anabranch.demo.train", str(output), str(steps)]
    command = [sys.executable, *torchrun, "--nproc-per-node", str(workers), *program]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=DEADLINE_S, check=False)
    if not output.exists():  # it is written when all is done; how the workers end after that does not matter
        raise AnabranchError(f"the demo's workers ended with exit code {done.returncode}: their messages are above")
    runs: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return runs


def _print(document: "DemoDocument") -> None:
    from rich.text import Text

    from anabranch.report.formatting import plain, time_scale
    from anabranch.report.tables import columns

    runs = document.runs
    scale = time_scale(run.step_s for run in runs.values())
    title = f"{document.parameters:,} parameters, {document.workers} workers, {document.steps} steps"
    headers = ("first loss", "last loss", f"step, {scale.unit}", "middle half")
    table = columns(title, "trained as", *headers, left=["trained as"])
    for name, run in runs.items():
        half = f"{scale(run.step_low_s)} – {scale(run.step_high_s)}"
        table.add_row(name, f"{run.first_loss:.4f}", f"{run.last_loss:.4f}", scale(run.step_s), half)
    explanation = "\n".join(plain(line) for line in document.explanation.splitlines())
    notes = [f"Note: {plain(note)}." for note in document.notes]
    print()
    show_tables(
        Text("What DataParallel did (model.explain()):", style="bold"),
        Text("\n".join([explanation, *notes])),
        table,
        Text("\n".join(_verdict(document))),
    )


def _verdict(document: "DemoDocument") -> Sequence[str]:
    """What the table means, for someone who sees it for the first time."""
    apart, ratio = document.largest_loss_difference, document.step_ratio
    equal = (
        f"Same losses, to rounding: at no step do they differ by more than {apart:.0e}." if apart else "Same losses."
    )
    times = (
        f"A step of DataParallel takes {ratio.median:.2f} of the time of one of DDP (half of the rounds: "
        f"{ratio.low:.2f} to {ratio.high:.2f}), both taking turns once DataParallel had chosen"
    )
    times += ": no difference beyond this machine's noise." if ratio.low <= 1 <= ratio.high else "."
    if document.plan is None:
        why = (
            "On this machine no plan beat DDP's own buckets, so DataParallel kept those: both run the same buckets. "
            "Plans pay where the network takes a good part of a step and steps vary little; here four workers share "
            "this machine's cores, and steps vary."
        )
    else:
        buckets = len(document.plan["buckets"])
        why = f"It runs a plan of {buckets} buckets, which was faster than DDP's own when it was tried."
    return [equal, times, why]
