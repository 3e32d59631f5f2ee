"""anabranch bench: stock DDP with its settings and hooks against DataParallel, in turn, on the same ranks."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from anabranch.fsdp.planning.sharding_modes import SHARDING_MODES, help_of, sharding_mode
from anabranch.tools.cli import arguments
from anabranch.tools.cli.output import check_free, print_document, say, show_tables
from anabranch.tools.cli.ranks import join
from anabranch.tools.cli.shared_options import BackendOption, ForceOption, JsonOption
from anabranch.values.errors import AnabranchError
from anabranch.values.files import write_bytes

if TYPE_CHECKING:
    from anabranch.tools.bench.benchmark import Settings
    from anabranch.tools.bench.workload import Workload

HOW = "anabranch lab --hosts 4 --rate 10gbit -- anabranch bench --trace resnet50, or torchrun with -m anabranch bench"
TITLE = "Every rival in one run"

MODEL = Option(
    metavar="NAME[:BATCH]",
    help="A model of torchvision or transformers, such as resnet50, or gpt2:4 with its batch per rank; repeatable.",
)
TRACE = Option(
    metavar="T", help="Replay this trace instead, sleeping as long as it computed: a file or a bundled name."
)
SEARCH_STEPS = Option(
    min=20,
    help="End each DataParallel's search after about this many steps, with the best layout so far: for short runs. "
    "Compiled graphs are then still cut for it, in about 25 steps. By default it takes what it needs.",
)
COMPRESS = Option(
    metavar="KIND",
    help="Also DataParallel with auto (as faithful as is hidden, down to int4), auto:int8 (down to int8), "
    "auto:oktopk:0.01 (down to 1 % sparse), bf16, int8, int4, oktopk (as dense as is hidden) or oktopk:0.01 (1 % of "
    "the elements), the last two also with :bf16 or :int8, as which values travel then; repeatable.",
)
COMPILE = Option("--compile", help="Also computing alone, DDP and each DataParallel under torch.compile; for --model.")
FLAT = Option(
    "--flat",
    help="Also each DataParallel with nodes=False: exchanges that do not know which ranks share a card.",
)
SHARDED = Option(
    metavar="NAME",
    help=f"Also the model sharded over all ranks, or inside nodes of several: {help_of(SHARDING_MODES)}; for --model; "
    "repeatable.",
)
ONLY = Option(
    metavar="TEXT", help="Only contestants whose name contains this, and DDP, DataParallel and --compress; repeatable."
)


def bench(
    model: Annotated[list[str] | None, MODEL] = None,
    trace: Annotated[list[str] | None, TRACE] = None,
    slower: Annotated[float, Option(min=0.01, help="Replay traces this many times more slowly.")] = 1.0,
    num_warmup_batches: Annotated[int, Option(min=0, help="Steps before each turn, not counted.")] = 3,
    num_batches_per_iter: Annotated[int, Option(min=1, help="Steps of a turn.")] = 10,
    num_iters: Annotated[int, Option(min=1, help="Turns of each contestant.")] = 10,
    profile_steps: Annotated[int, Option(min=1, help="Steps of each of DataParallel's own trials.")] = 6,
    search_steps: Annotated[int | None, SEARCH_STEPS] = None,
    compress: Annotated[list[str] | None, COMPRESS] = None,
    compiled: Annotated[bool, COMPILE] = False,
    flat: Annotated[bool, FLAT] = False,
    sharded: Annotated[list[str] | None, SHARDED] = None,
    only: Annotated[list[str] | None, ONLY] = None,
    backend: BackendOption = None,
    report: Annotated[Path | None, Option(help="Write a Markdown report to this file.")] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Race DDP with every setting and hook against DataParallel on one model and network."""
    models_only = {"--compile": compiled, "--sharded": sharded}
    _check_workloads(model, trace, [option for option, given in models_only.items() if given])
    if "RANK" not in os.environ:
        raise AnabranchError(f"bench runs on ranks, and this is none (RANK is not set): {HOW}")
    _check_report(report, force)
    traces = [(text, arguments.trace(text)) for text in trace or ()]
    from anabranch.tools.bench.benchmark import Settings
    from anabranch.tools.bench.compress_option import compression
    from anabranch.tools.bench.workload import replay_workload, zoo_workload

    kinds, shardings = list(dict.fromkeys(compress or ())), list(dict.fromkeys(sharded or ()))
    for known, names in ((compression, kinds), (sharding_mode, shardings)):
        for name in names:
            known(name)  # ValueError for one that it does not know
    settings = Settings(
        iters=num_iters,
        batches=num_batches_per_iter,
        warmup=num_warmup_batches,
        profile_steps=profile_steps,
        compress=kinds,
        only=only or (),
        compiled=compiled,
        flat=flat,
        sharded=shardings,
        search_steps=search_steps,
    )
    device = join(backend, on_gpu=bool(model))
    workloads = [zoo_workload(name, device) for name in model or ()]
    workloads += [replay_workload(Path(text).stem, noun, slower) for text, noun in traces]
    _run(workloads, settings, report, as_json)


def _run(workloads: "Sequence[Workload]", settings: "Settings", report: Path | None, as_json: bool) -> None:
    """One workload after the other; rank 0 prints and writes the results of each when it is done."""
    import torch.distributed as dist

    from anabranch.tools.bench.benchmark import run_benchmark
    from anabranch.tools.report import benchmark as benchmarks
    from anabranch.tools.report.documents import BenchDocument

    leads = dist.get_rank() == 0
    results = []
    for workload in workloads:
        results.append(run_benchmark(workload, settings, say if leads else lambda _: None))
        if leads and not as_json:
            closing = "\n".join(benchmarks.closing_lines(results[-1]))
            show_tables(*benchmarks.benchmark_report(results[-1]), closing, "")
        if leads and report is not None:  # check_free has made sure of it
            write_bytes(benchmarks.markdown(TITLE, results).encode(), report, force=True)
    if leads:
        written = [f"Written to {report}."] if report else []
        print_document(BenchDocument(benchmarks=tuple(results)), as_json, lambda: written)
    dist.destroy_process_group()


def _check_workloads(model: Sequence[str] | None, trace: Sequence[str] | None, models_only: Sequence[str]) -> None:
    """``models_only``: the options given that mean nothing to a replayed trace."""
    if not model and not trace:
        raise ValueError("nothing to run: give --model resnet50, or --trace resnet50 where there is no GPU")
    if model and trace:
        raise ValueError("--model and --trace: models compute on the GPU and traces on the CPU; run them apart")
    if trace and models_only:
        raise ValueError(
            f"{models_only[0]} and --trace {trace[0]}: a replayed trace sleeps, and has no model whose blocks or "
            f"graphs there could be; give --model, or leave {models_only[0]} out"
        )


def _check_report(report: Path | None, force: bool) -> None:
    """Refuse, before minutes of measuring, an output file that exists, or in a folder that does not."""
    check_free([report], force)
    if report is not None and not report.absolute().parent.is_dir():
        raise ValueError(f"{report.absolute().parent}: no such folder, expected one for {report.name}")
