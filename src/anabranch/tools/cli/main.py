"""The console command ``anabranch``: its verbs, and the one place where an error becomes a line and an exit code."""

import os
import sys
from typing import Annotated, cast

import typer
from typer.main import get_command

from anabranch.tools.cli.bench import bench
from anabranch.tools.cli.demo import demo
from anabranch.tools.cli.lab import lab
from anabranch.tools.cli.measure import measure
from anabranch.tools.cli.memory import memory
from anabranch.tools.cli.plan import compare, plan, simulate
from anabranch.tools.cli.record import import_trace, record
from anabranch.tools.cli.report import report
from anabranch.tools.cli.reproduce import reproduce
from anabranch.tools.cli.run import Program, run
from anabranch.tools.cli.scale import scale
from anabranch.tools.cli.shared_options import check_options
from anabranch.tools.cli.show import cache, list_, show
from anabranch.values.errors import AnabranchError
from anabranch.values.version import __version__

FAILED, INTERRUPTED, PIPE_CLOSED = 2, 130, 1

# Its base class for every wrong use. Some versions of typer bring their own click, others import it: typer's own
# name for one of the subclasses is there in all.
_ClickException = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[2])

app = typer.Typer(
    name="anabranch",
    help="Plan how gradients travel in data-parallel training, and predict what that costs at any number of GPUs.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Options after the first word of their program are the program's, also where "--" is left out.
RUNS_A_PROGRAM = {"allow_interspersed_args": False}
for panel, verbs in {
    "Start here": (demo, run, report),
    "Predict, on any machine": (compare, scale, memory, plan, simulate, reproduce),
    "Measure, on yours": (record, import_trace, measure, bench, lab),
    "Look at what there is": (list_, show, cache),
}.items():
    for verb in verbs:
        settings = RUNS_A_PROGRAM if verb in (lab, run) else None
        name = verb.__name__.strip("_").replace("_", "-")
        app.command(name, rich_help_panel=panel, context_settings=settings)(verb)


@app.callback(invoke_without_command=True, add_help_option=False)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    # Our own instead of typer's, which would import pydantic at every start.
    wants_help: Annotated[bool, typer.Option("--help", "-h", help="Show this message and exit.")] = False,
) -> None:
    if version:
        print(f"anabranch {__version__}")
    elif wants_help or context.invoked_subcommand is None:
        print(context.get_help())
    else:
        return
    raise typer.Exit


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 after an error, 130 after Ctrl-C, 1 if the reader went away.

    A program of the user's runs last, where its exceptions and its exit are its own.
    """
    result = _command(argv)
    if isinstance(result, int):
        return result
    result()
    return 0


def _command(argv: list[str] | None) -> int | Program:
    if sys.stdout is None:  # closed by the parent process
        return PIPE_CLOSED
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter shows "?" instead of failing
    try:
        check_options(sys.argv[1:] if argv is None else argv)
        code = get_command(app).main(args=argv, prog_name="anabranch", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) or callable(code) else 0
    except SystemExit as stop:  # rich and click leave this way when the reader of a pipe has gone
        return stop.code if isinstance(stop.code, int) else FAILED
    except BrokenPipeError:
        # Whatever is left in the buffer would fail once more when Python closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except _ClickException as error:
        context = getattr(error, "ctx", None)
        verb = context.command_path if context is not None else "anabranch"
        return _fail(f"{error.format_message().rstrip('.')}; try: {verb} --help")
    except (AnabranchError, ValueError, ArithmeticError, OSError) as error:
        return _fail(str(error))


def _fail(message: str) -> int:
    from anabranch.tools.report.formatting import plain  # rich, which --help without colours need not load

    # A message may quote a file: all of it goes on one line, and none of it to the terminal's controls.
    print(f"anabranch: error: {plain(' '.join(message.split()))}", file=sys.stderr)
    return FAILED
