"""anabranch import-trace: the trace in a file of torch.profiler."""

from pathlib import Path
from typing import Annotated

import typer

from anabranch.tools.cli.output import ForceOption, JsonOption, check_free, check_other, print_json, show_tables
from anabranch.values.files import save

FileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="What export_chrome_trace wrote (.json or .json.gz) of a profile with record_shapes=True, on CPU or CUDA.",
    ),
]
OutputOption = Annotated[Path, typer.Option("-o", "--output", help="Write the trace to this file.")]
ModelOption = Annotated[str | None, typer.Option(help="What to call the model; the file does not say.")]
BatchOption = Annotated[
    int | None, typer.Option(min=1, help="Samples per rank and step, for scale --batch; the file does not say.")
]


def import_trace(
    file: FileArgument,
    output: OutputOption,
    model: ModelOption = None,
    batch: BatchOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a trace from a Chrome trace of torch.profiler that you already have."""
    check_free([output], force)
    check_other(output, [file])
    from rich.text import Text

    from anabranch.tools.profiler_trace import load_profiler_trace
    from anabranch.tools.report import figures, tables
    from anabranch.tools.report.formatting import plain

    trace = load_profiler_trace(file, model, batch)
    save(trace, output, force)
    if as_json:
        meta = {"meta": dict(trace.meta), "written": str(output)}
        print_json({"command": "import-trace", **figures.trace_figures(trace), **meta})
    else:
        notes = [
            Text(plain(f"{what}: {trace.meta[key]}."))
            for what, key in (("Assumed", "assumed"), ("Not known", "not_known"))
        ]
        show_tables(tables.trace_report(trace), *notes, f"Written to {output}.")
