"""anabranch record and import-trace: the trace of the user's model, of a well-known one, or of a profile."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from anabranch.tools.cli.output import check_free, check_other, progress
from anabranch.tools.cli.shared_options import ForceOption, JsonOption, Precision
from anabranch.tools.cli.show import print_saved
from anabranch.tools.cli.user_function import RECORDED, model_and_step
from anabranch.values.checks import Scalar
from anabranch.values.files import save
from anabranch.values.trace import Trace

if TYPE_CHECKING:
    from torch import nn

NOTES = {"Assumed": "assumed", "Not known": "not_known"}  # by their keys in the meta of an imported trace

WHAT = Argument(
    metavar="MODULE:FUNCTION",
    help="A function of yours that returns (model, step), where step() runs one forward and one backward of model; or "
    "the name of a model of torchvision or transformers, such as resnet50 or bert-base.",
)
PROFILE = Argument(
    metavar="FILE",
    help="What export_chrome_trace wrote (.json or .json.gz) of a profile with record_shapes=True, on CPU or CUDA.",
)
Device = Literal["cpu", "cuda"]
Output = Annotated[Path, Option("-o", "--output", help="Write the trace to this file.")]
Batch = Annotated[int | None, Option(min=1, help="Samples per rank and step, for scale --batch.")]


def record(
    what: Annotated[str, WHAT],
    output: Output,
    steps: Annotated[int, Option(min=1, help="Steps to record; the trace holds their median and spread.")] = 20,
    warmup: Annotated[int, Option(min=0, help="Steps before those, not recorded.")] = 5,
    device: Annotated[Device | None, Option(help="For a named model; cuda where there is one.")] = None,
    precision: Annotated[Precision | None, Option(help="For a named model; fp32 unless told.")] = None,
    batch: Batch = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Record when each gradient of a model is ready, over some live steps on this machine."""
    check_free([output], force)
    meta: Mapping[str, Scalar]
    if ":" in what:
        given = {"--device": device, "--precision": precision}
        if wrong := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"{wrong[0]} is for named models: your own function decides that for {what}")
        model, step = model_and_step(what)
        meta = {"model": type(model).__name__, "recorded_from": what, **({} if batch is None else {"batch": batch})}
    else:
        model, step, meta = _named(what, device, precision or "fp32", batch)
    from anabranch.observe.recorder import record as recorded

    with progress() as update:
        done = count(1)

        def counted() -> None:
            step()
            update("recording", next(done), warmup + steps)

        trace = recorded(model, counted, steps, warmup, meta)
    _save("record", trace, output, force, as_json)


def import_trace(
    file: Annotated[Path, PROFILE],
    output: Output,
    model: Annotated[str | None, Option(help="What to call the model; the file does not say.")] = None,
    batch: Batch = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a trace from a Chrome trace of torch.profiler that you already have."""
    check_free([output], force)
    check_other(output, [file])
    from anabranch.tools.profiler_trace import load_profiler_trace

    _save("import-trace", load_profiler_trace(file, model, batch), output, force, as_json)


def _save(command: str, trace: Trace, output: Path, force: bool, as_json: bool) -> None:
    """Write the trace, and print what is in it."""
    save(trace, output, force)
    notes = [f"{what}: {trace.meta[key]}." for what, key in NOTES.items() if key in trace.meta]
    print_saved(command, trace, output, as_json, notes, {"meta": dict(trace.meta)})


def _named(
    name: str, device: str | None, precision: Precision, batch: int | None
) -> "tuple[nn.Module, Callable[[], object], Mapping[str, Scalar]]":
    import torch

    from anabranch.tools.bench import zoo

    if name not in zoo.MODELS:
        raise ValueError(f"{name}: expected {RECORDED}, or one of {', '.join(zoo.MODELS)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch sees no GPU here: choose cpu, or install a torch build for CUDA")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model, step = zoo.model_and_step(name, where, torch.bfloat16 if precision == "bf16" else None, batch)
    return model, partial(step, model), zoo.trace_meta(name, precision == "bf16", batch)
