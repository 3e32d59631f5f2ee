"""anabranch bench: stock DDP with its settings and hooks against DataParallel, in turn, on the same ranks."""

import os
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from anabranch.fsdp.planning.modes import SHARDING_MODES, help_of, sharding_mode
from anabranch.tools.cli import arguments
from anabranch.tools.cli.output import ForceOption, JsonOption, check_free, plot_format, print_json, show_tables
from anabranch.tools.cli.ranks import join
from anabranch.values.errors import AnabranchError
from anabranch.values.files import write_bytes
from anabranch.values.plan import MAX_LANES

if TYPE_CHECKING:
    from anabranch.tools.bench.run import Settings
    from anabranch.tools.bench.workload import Workload
    from anabranch.tools.report.plot import Format

HOW = "anabranch lab --hosts 4 --rate 10gbit -- anabranch bench --trace resnet50, or torchrun with -m anabranch bench"

ModelOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[:BATCH]",
        help="A model of torchvision or transformers, such as resnet50 or gpt2:4; may be repeated.",
    ),
]
TraceOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="T", help="Replay this trace instead, sleeping as long as it computed: a file or a bundled name."
    ),
]
SlowerOption = Annotated[float, typer.Option(min=0.01, help="Replay traces so many times more slowly.")]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Images or sequences per rank, for --model.")]
ChannelsLastOption = Annotated[
    bool,
    typer.Option(
        "--channels-last",
        help="Weights and images of every contestant in torch.channels_last; for --model of images. Not "
        "for ranks that share a GPU.",
    ),
]
WarmupOption = Annotated[int, typer.Option(min=0, help="Steps before each turn, not counted.")]
BatchesOption = Annotated[int, typer.Option(min=1, help="Steps of a turn.")]
ItersOption = Annotated[int, typer.Option(min=1, help="Turns of each contestant.")]
ProfileOption = Annotated[int, typer.Option(min=1, help="Steps of each of DataParallel's own trials.")]
SearchOption = Annotated[
    int,
    typer.Option(
        min=30,
        help="What each DataParallel's search may cost, in steps; fewer end sooner where steps are noisy and long.",
    ),
]
HoldOption = Annotated[
    int | None,
    typer.Option(
        min=30,
        help="End each search after about so many steps, with the best layout found so far: for short runs. Compiled "
        "graphs are then still cut for it, in about 25 steps. Trials of layouts as fast as DDP cost nothing, so that "
        "--search-steps does not end them.",
    ),
]
SizesOption = Annotated[str, typer.Option(metavar="MIB,...", help="Bucket sizes to try with DDP.")]
LanesOption = Annotated[str, typer.Option(metavar="N,...", help="Numbers of lanes to plan for.")]
CompressOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WAY",
        help="Also DataParallel with auto (as faithful as is hidden, down to int4), auto:int8 (down to int8), "
        "auto:oktopk:0.01 (down to 1 % sparse), bf16, int8, int4, oktopk (as dense as is hidden) or oktopk:0.01 "
        "(1 % of the elements), the last two also with :bf16 or :int8, as which values travel then; or a rival, in the "
        "same buckets: topk:0.01, gtopk:0.01, dsa:0.01, gaussian:0.01; may be repeated.",
    ),
]
CompileOption = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Also computing alone, DDP and each DataParallel under torch.compile; for --model. DDP also with a graph "
        "that is not cut, unless --only leaves it out (--only uncut does not).",
    ),
]
OwnCachesOption = Annotated[
    bool,
    typer.Option(
        "--own-caches",
        help="With --compile: torch's caches are empty for each contestant, so that the report can say how much longer "
        "cuts take to compile. Takes longer: without it, contestants find parts of each other there.",
    ),
]
ShardedOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WAY",
        help=f"Also the model sharded over all ranks, or inside nodes of several: {help_of(SHARDING_MODES)}; for "
        "--model; may be repeated.",
    ),
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="Only contestants whose name contains this, beside DDP, DataParallel and --compress; may be repeated.",
    ),
]
SkipOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Leave out this contestant of --compress or --compile, which saves its search and its compiling, too: "
        "'DataParallel, int8', 'DDP, compiled' or 'DataParallel, int8, compiled'; may be repeated.",
    ),
]
BackendOption = Annotated[str | None, typer.Option(help="gloo or nccl; nccl where there is a GPU.")]
ReportOption = Annotated[Path | None, typer.Option(help="Write a Markdown report to this file.")]
PlotOption = Annotated[Path | None, typer.Option(help="Draw steps as shares of DDP's to this .svg or .png file.")]
TitleOption = Annotated[str, typer.Option(help="Title of that report.")]


def bench(
    model: ModelOption = None,
    trace: TraceOption = None,
    slower: SlowerOption = 1.0,
    batch_size: BatchOption = None,
    channels_last: ChannelsLastOption = False,
    num_warmup_batches: WarmupOption = 3,
    num_batches_per_iter: BatchesOption = 10,
    num_iters: ItersOption = 10,
    profile_steps: ProfileOption = 6,
    search_steps: SearchOption = 100,
    hold_after: HoldOption = None,
    bucket_sizes: SizesOption = "1,5,10,50,100",
    lanes: LanesOption = "2,4",
    compress: CompressOption = None,
    compiled: CompileOption = False,
    own_caches: OwnCachesOption = False,
    sharded: ShardedOption = None,
    only: OnlyOption = None,
    skip: SkipOption = None,
    backend: BackendOption = None,
    report: ReportOption = None,
    title: TitleOption = "Every rival in one run",
    plot: PlotOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Race DDP with every setting and hook against DataParallel on one model and network; predicted beside measured."""
    _check_workloads(model, trace, compiled, own_caches, bool(sharded), channels_last)
    check_free([report, plot], force)
    _check_folders([report, plot])
    form = plot_format(plot)
    sizes, counts = _numbers("--bucket-sizes", bucket_sizes), _counts(lanes)
    kinds, ways = list(dict.fromkeys(compress or ())), list(dict.fromkeys(sharded or ()))
    traces = [(text, arguments.trace(text)) for text in trace or ()]
    from anabranch.tools.bench.run import Settings
    from anabranch.tools.bench.workload import replay_workload, zoo_workload

    _check_known(ways, kinds)
    settings = Settings(
        iters=num_iters,
        batches=num_batches_per_iter,
        warmup=num_warmup_batches,
        profile_steps=profile_steps,
        sizes_mib=sizes,
        lanes=counts,
        compress=kinds,
        only=only or (),
        compiled=compiled,
        sharded=ways,
        skip=skip or (),
        own_caches=own_caches,
        search_steps=search_steps,
        hold_after=hold_after,
    )
    settings.check_skipped()
    device = join(backend, on_gpu=bool(model))
    workloads = [zoo_workload(name, device, batch_size, channels_last) for name in model or ()]
    workloads += [replay_workload(Path(text).stem, noun, slower) for text, noun in traces]
    _run(workloads, settings, _Outputs(report, title, plot, form, as_json))


class _Outputs(NamedTuple):
    """The files to write, and whether to print JSON."""

    report: Path | None
    title: str
    plot: Path | None
    form: "Format | None"
    as_json: bool


def _run(workloads: "Sequence[Workload]", settings: "Settings", outputs: _Outputs) -> None:
    """One workload after the other; rank 0 prints and writes the results of each when it is done."""
    import torch.distributed as dist

    from anabranch.tools.bench.run import run
    from anabranch.tools.report import benchmark as reports
    from anabranch.tools.report.documents import BenchDocument, printed
    from anabranch.tools.report.race_plot import race_plot

    leads = dist.get_rank() == 0
    results = []
    for workload in workloads:
        results.append(run(workload, settings, _print_progress if leads else lambda _: None))
        if not leads:
            continue
        if not outputs.as_json:
            closing = "\n".join(reports.closing_lines(results[-1]))
            show_tables(reports.benchmark_report(results[-1]), closing, "")
        if outputs.report is not None:  # check_free has made sure of it
            write_bytes(reports.markdown(outputs.title, results).encode(), outputs.report, force=True)
        if outputs.plot is not None and outputs.form is not None:
            write_bytes(race_plot(results, outputs.form), outputs.plot, force=True)
    if leads and not outputs.as_json and (written := [str(path) for path in (outputs.report, outputs.plot) if path]):
        show_tables(f"Written to {' and '.join(written)}.")
    if leads and outputs.as_json:
        print_json(printed(BenchDocument(benchmarks=tuple(results))))
    dist.destroy_process_group()


def _check_workloads(
    model: Sequence[str] | None,
    trace: Sequence[str] | None,
    compiled: bool,
    own_caches: bool,
    sharded: bool,
    channels_last: bool,
) -> None:
    if not model and not trace:
        raise ValueError("nothing to run: give --model resnet50, or --trace resnet50 where there is no GPU")
    if model and trace:
        raise ValueError("--model and --trace: models compute on the GPU and traces on the CPU; run them apart")
    if trace and compiled:
        raise ValueError(
            "--compile and --trace: a replayed trace sleeps, and there is nothing to compile; give --model"
        )
    if trace and sharded:
        raise ValueError("--sharded and --trace: a replayed trace has no blocks to make units of; give --model")
    if trace and channels_last:
        raise ValueError(
            f"--channels-last and --trace {trace[0]}: a replayed trace has no images whose layout could change; give "
            "--model, or leave --channels-last out"
        )
    if own_caches and not compiled:
        raise ValueError("--own-caches is about what torch has compiled: it needs --compile")
    if "RANK" not in os.environ:
        raise AnabranchError(f"bench runs on ranks, and this is none (RANK is not set): {HOW}")


def _check_known(ways: Sequence[str], kinds: Sequence[str]) -> None:
    """ValueError for a value of --sharded or --compress that is not known."""
    from anabranch.tools.bench.compress import compression

    for way in ways:
        sharding_mode(way)
    for kind in kinds:
        compression(kind)


def _check_folders(paths: Sequence[Path | None]) -> None:
    """Refuse, before minutes of measuring, an output file in a folder that does not exist."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{path.absolute().parent}: no such folder, expected one for {path.name}")


def _numbers(option: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = [0.0]
    if any(not 0 < number < inf for number in numbers):
        raise ValueError(f"{option} is {text!r}: expected positive numbers with commas between them")
    return list(dict.fromkeys(numbers))


def _counts(text: str) -> list[int]:
    numbers = _numbers("--lanes", text)
    if any(number != int(number) or number > MAX_LANES for number in numbers):
        raise ValueError(f"--lanes is {text!r}: expected whole numbers from 1 to {MAX_LANES}")
    return [int(number) for number in numbers]


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
