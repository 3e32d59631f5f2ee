"""anabranch record: the trace of the user's model, or of a well-known one."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.tools.cli import user_function
from anabranch.tools.cli.output import ForceOption, JsonOption, check_free, print_json, progress, show_tables
from anabranch.values.checks import Scalar
from anabranch.values.files import save

if TYPE_CHECKING:
    from torch import nn

EXAMPLE = "a function of yours as module:function, such as train:setup"


class Precision(StrEnum):
    """What a named model computes in; its parameters and gradients are float32 in both."""

    fp32 = "fp32"
    bf16 = "bf16"


WhatArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="A function of yours that returns (model, step), where step() runs one forward and one backward of model; "
        "or the name of a model of torchvision or transformers, such as resnet50 or bert-base.",
    ),
]
OutputOption = Annotated[Path, typer.Option("-o", "--output", help="Write the trace to this file.")]
StepsOption = Annotated[int, typer.Option(min=1, help="Steps to record; the trace holds their median and spread.")]
WarmupOption = Annotated[int, typer.Option(min=0, help="Steps before those, not recorded.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu or cuda, for a named model; cuda where there is one.")]
PrecisionOption = Annotated[Precision | None, typer.Option(help="For a named model; fp32 unless told.")]
BatchOption = Annotated[
    int | None,
    typer.Option(min=1, help="Samples per step: of a named model, or, for scale --batch, of what yours does."),
]


def record(
    what: WhatArgument,
    output: OutputOption,
    steps: StepsOption = 20,
    warmup: WarmupOption = 5,
    device: DeviceOption = None,
    precision: PrecisionOption = None,
    batch: BatchOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Record when each gradient of a model is ready, over some live steps on this machine."""
    check_free([output], force)
    if ":" in what:
        given = {"--device": device, "--precision": precision}
        if wrong := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"{wrong[0]} is for named models: your own function decides that for {what}")
        model, step = _own(what)
        noted: Mapping[str, Scalar] = {} if batch is None else {"batch": batch}
        meta: Mapping[str, Scalar] = {"model": type(model).__name__, "recorded_from": what, **noted}
    else:
        model, step, meta = _named(what, device, precision or Precision.fp32, batch)
    from anabranch.observe.recorder import record as recorded
    from anabranch.tools.report import figures, tables

    calls = progress(range(warmup + steps), warmup + steps, "recording")

    def counted() -> None:
        next(calls)
        step()

    trace = recorded(model, counted, steps, warmup, meta)
    next(calls, None)  # ends the generator, which removes the bar
    save(trace, output, force)
    if as_json:
        print_json({"command": "record", **figures.trace_figures(trace), "written": str(output)})
    else:
        show_tables(tables.trace_report(trace), f"Written to {output}.")


def _own(what: str) -> "tuple[nn.Module, Callable[[], object]]":
    """The model and the step that the user's own function makes."""
    function, name = user_function.load_function(what, EXAMPLE), what.partition(":")[2]
    user_function.check_call(what, name, function)
    with user_function.one_error(what, f"{name}()", "a function that returns (model, step)"):
        made = function()
    model, step = user_function.check_returned(what, made, "step): a torch module and a function")
    user_function.check_call(what, "step", step)

    def one_step() -> None:
        with user_function.one_error(what, "its step()", "one that runs a forward and a backward, however often"):
            step()

    return model, one_step


def _named(
    name: str, device: str | None, precision: Precision, batch: int | None
) -> "tuple[nn.Module, Callable[[], object], Mapping[str, Scalar]]":
    import torch

    from anabranch.tools.bench import zoo

    if name not in zoo.MODELS:
        raise ValueError(f"{name}: expected {EXAMPLE}, or one of {', '.join(zoo.MODELS)}")
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"--device is {device!r}: expected cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch sees no GPU here: choose cpu, or install a torch build for CUDA")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model, step = zoo.model_and_step(name, where, torch.bfloat16 if precision is Precision.bf16 else None, batch)
    return model, partial(step, model), zoo.trace_meta(name, precision is Precision.bf16, batch)
