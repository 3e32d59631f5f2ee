"""anabranch run: an unchanged DDP script with DataParallel in DDP's place, and what that gains."""

import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from anabranch.planning import PLANNERS

SINGLE = "RANK"  # torchrun and other launchers set it
MODULE = "anabranch.run"
NOTHING = (
    "this process has made no DistributedDataParallel of torch's; if the script starts ranks by itself, such as by "
    "mp.spawn, have them started by torchrun or --nproc-per-node; if it uses anabranch already, run it without "
    "anabranch run"
)


Program = Callable[[], None]  # of the user's, to be run where its exceptions and its exit are its own


def run(
    script: Annotated[list[str], Argument(metavar="SCRIPT", help="The script, with its arguments.")],
    nproc_per_node: Annotated[
        int | None,
        Option("--nproc-per-node", min=1, help="Start this many ranks here, as torchrun --standalone does."),
    ] = None,
    compress: Annotated[
        str | None,
        Option(help="bf16, int8, int4, auto, auto:int8, auto:oktopk:0.01, oktopk, oktopk:0.01 or oktopk:0.01:bf16."),
    ] = None,
    planner: Annotated[str | None, Option(help=f"One of {', '.join(PLANNERS)}; by default optimal.")] = None,
    lanes: Annotated[int | None, Option(min=1, help="The most messages that may travel at the same time.")] = None,
    module: Annotated[bool, Option("-m", help="SCRIPT is the name of a module, as for python -m.")] = False,
) -> Program:
    """Run an unchanged DDP script with DDP replaced, and say what it gains: anabranch run --nproc-per-node 2 train.py.

    Under torchrun: torchrun OPTIONS -m anabranch.run train.py. Nothing is read from the plan cache or kept there.
    """
    if nproc_per_node is not None and SINGLE in os.environ:
        raise ValueError("--nproc-per-node, but a launcher has started this rank already: leave one of the two out")
    if not module and not Path(script[0]).is_file():
        raise ValueError(f"{script[0]}: no such file; expected a Python script, or a module after -m")
    names = script[0].split(".")
    is_name = all(name.isidentifier() for name in names)
    if module and not (is_name and PathFinder.find_spec(names[0], [str(Path.cwd()), *sys.path])):
        raise ValueError(f"{script[0]}: no such module in this folder, or installed; expected what python -m takes")
    if planner is not None and planner not in PLANNERS:
        raise ValueError(f"--planner is {planner!r}: expected one of {', '.join(PLANNERS)}")
    given: dict[str, Any] = {"compress": compress, "planner": planner, "lanes": lanes}
    given = {name: value for name, value in given.items() if value is not None}
    arguments = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    if compress is not None:
        from anabranch.tools.bench.compress_option import compression
        from anabranch.values.kinds.options import OkTopk

        given["compress"] = compression(compress, OkTopk())
    arguments += ["-m"] * module + list(script)
    if nproc_per_node is not None:
        return partial(_start_ranks, nproc_per_node, arguments)
    return partial(_run_script, script, module, {"cache": False, **given})


def _start_ranks(count: int, arguments: Sequence[str]) -> None:
    """Start ranks here by torchrun, each of which runs ``anabranch run`` with these arguments."""
    from torch.distributed.run import main as torchrun

    torchrun(["--standalone", f"--nproc-per-node={count}", "-m", MODULE, *arguments])


def _run_script(script: Sequence[str], is_module: bool, options: Mapping[str, Any]) -> None:
    """Run the script with DDP replaced, and say on rank 0 what was gained; exceptions of the script pass through.

    ``options``: of DataParallel.
    """
    from anabranch.frameworks.ddp_replacement import replaced_ddp

    with replaced_ddp(options) as outcomes:
        sys.argv = list(script)
        try:
            if is_module:
                sys.path[0] = str(Path.cwd())
                runpy.run_module(script[0], run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = str(Path(script[0]).resolve().parent)
                runpy.run_path(script[0], run_name="__main__")
        except SystemExit as stop:
            if stop.code in (None, 0):
                _report(outcomes)
            raise
    _report(outcomes)


def _report(outcomes: Sequence[object]) -> None:
    """To stderr, since stdout is the script's."""
    if os.environ.get(SINGLE, "0") != "0":
        return
    for outcome in outcomes or [NOTHING]:
        print(f"anabranch run: {outcome}", file=sys.stderr)
