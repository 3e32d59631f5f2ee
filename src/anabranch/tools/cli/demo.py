"""anabranch demo: one small training under several setups, on slow links made on this machine, and a page of it."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from typer import Option

from anabranch.tools.cli.lab import UNSHAPED, EmulateOption, link_rate
from anabranch.tools.cli.output import check_free, print_document, say
from anabranch.tools.cli.report import write_page
from anabranch.tools.cli.shared_options import ForceOption, JsonOption
from anabranch.tools.demo import RESULTS
from anabranch.tools.lab.cluster import Cluster
from anabranch.tools.predict.scaling import scale
from anabranch.values.dependencies import require
from anabranch.values.errors import AnabranchError, LabError, MissingExtraError
from anabranch.values.files import load_bundled_trace, write_bytes

FEWEST_STEPS = 40  # a search for a plan takes 30 to 60
DEADLINE_S = 900
TORCHRUN_ENDS_S = 5
ALPHA_S = 50e-6  # latency of emulated links
SCALED, SCALED_PLANNERS, SCALED_COMPRESS = "densenet201", ("by_bytes", "optimal"), ("auto", "int8", "oktopk:0.01")
FOLDER = Path("anabranch-demo")
PAGE, DOCUMENT, SCALING = "report.html", "demo.json", "scale.json"
OF_AUTO = ("auto_trace.json", "auto_network.json", "auto_plan.json", "auto_timeline.json", "auto_steps.json",
           "auto.jsonl")  # fmt: skip
KEPT = (DOCUMENT, *OF_AUTO, SCALING)


def demo(
    workers: Annotated[int, Option(min=2, max=64, help="Worker processes, all on this machine.")] = 2,
    steps: Annotated[int, Option(min=FEWEST_STEPS, help="Steps of each training.")] = 60,
    rate: Annotated[str, Option(help=f"Rate of all links; {UNSHAPED}: this machine as it is.")] = "100mbit",
    emulate: EmulateOption = False,
    keep: Annotated[Path, Option(metavar="FOLDER", help="Write the page and its files there.")] = FOLDER,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a small transformer on slow links as DDP and under 5 other setups; a page of what that gains. 2 minutes."""
    check_free([keep / name for name in (*KEPT, PAGE)], force)
    cluster = _cluster(workers, link_rate(rate), emulate)
    link = _words(cluster)
    say(f"{workers} workers train a small transformer on Python's own sources, under several setups, on {link}.")
    with TemporaryDirectory(prefix="anabranch-") as name:
        folder = Path(name)
        results = {"command": "demo", "link": link, **_trained(folder, workers, steps, cluster)}
        (folder / DOCUMENT).write_text(json.dumps(results), encoding="utf-8")
        (folder / SCALING).write_text(json.dumps(_scaling()), encoding="utf-8")
        page = _keep(folder, keep)
    from anabranch.tools.report.page import demo_report
    from anabranch.tools.report.runs import parse_file

    document: Any = parse_file((keep / DOCUMENT).read_bytes(), f"{keep / DOCUMENT}")
    print_document(document, as_json, lambda: demo_report(document))
    sys.stdout.flush()  # before what follows on stderr
    say(page)


def _cluster(workers: int, rate_bit_s: float | None, emulate: bool) -> Cluster | None:
    """Workers on real slow links where this machine allows them, else on emulated ones; None for no slow links."""
    if rate_bit_s is None:
        if emulate:
            raise ValueError(f"--emulate with --rate {UNSHAPED}: expected a rate, such as 100mbit, of emulated links")
        return None
    from anabranch.tools.lab import preflight

    rates = [rate_bit_s] * workers
    for cluster in (*([] if emulate else [Cluster(rates)]), Cluster(rates, alpha_s=ALPHA_S)):
        try:
            preflight.check(cluster, [])
        except LabError as error:
            say(f"Not on {cluster}: {f'{error}'.replace(f', {preflight.EMULATE}', '')}.")
        else:
            return cluster
    return None


def _words(cluster: Cluster | None) -> str:
    if cluster is None:
        return "this machine as it is, without slow links"
    return f"{cluster}" + (" by delays inside the ranks: not a real network" if cluster.emulated else "")


def _trained(folder: Path, workers: int, steps: int, cluster: Cluster | None) -> dict[str, Any]:
    """All trainings, in worker processes of one thread each; their results, as rank 0 wrote them."""
    train = ["-m", "anabranch.tools.demo.train", f"{folder}", f"{steps}"]
    # torch warns that hosts of the lab have no names.
    program = ["env", "TORCH_CPP_LOG_LEVEL=ERROR", sys.executable, *train]
    if cluster is None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command = [*torchrun, "--nproc-per-node", f"{workers}", "--no-python", *program]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        launcher = subprocess.Popen(command, env=environment)
        try:
            code = launcher.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            code = 124
        except KeyboardInterrupt:  # a terminal's Ctrl-C reaches torchrun, too; while it ends its ranks it is left alone
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(TORCHRUN_ENDS_S)
            raise
        finally:
            launcher.terminate()
            launcher.wait()
    else:
        from anabranch.tools.lab.launch import run

        code = run(cluster, program, DEADLINE_S)
    if code == 128 + signal.SIGINT:  # the lab has passed it on to the workers
        raise KeyboardInterrupt
    output = folder / RESULTS
    if not output.exists():  # it is written when all is done; how the workers end after that does not matter
        raise AnabranchError(f"the demo's workers ended with exit code {code}: their messages are above")
    results: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return results


def _scaling() -> dict[str, Any]:
    """Predicted, from the trace of a larger model."""
    return asdict(scale(load_bundled_trace(SCALED), planners=SCALED_PLANNERS, compress=SCALED_COMPRESS))


def _keep(folder: Path, kept: Path) -> str:
    """Write the files of this run, and none of an earlier one, to ``kept``; the words that say where the page is."""
    kept.mkdir(parents=True, exist_ok=True)
    for name in (*KEPT, PAGE):
        (kept / name).unlink(missing_ok=True)
        if (folder / name).exists():
            write_bytes((folder / name).read_bytes(), kept / name)
    try:
        require("plotly", "report", "the page")
    except MissingExtraError as error:
        return f"{error}; then anabranch report {kept}"
    page = kept / PAGE
    write_page([kept / name for name in KEPT if (kept / name).exists()], page, "anabranch demo")
    return f"The page of it all: {page.resolve().as_uri()}"
