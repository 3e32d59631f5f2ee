"""Private names of torch's DistributedDataParallel are used in ddp/reducer.py and nowhere else in the library."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn
from torch.nn.parallel import distributed

import anabranch

SOURCE = Path(anabranch.__file__).parent
ALLOWED = SOURCE / "ddp" / "reducer.py"
MODULE = "torch.nn.parallel.distributed"
EXCEPTIONS = {  # by file and name, with the reason
    (
        "exchange/model_parameters.py",
        "_ddp_params_and_buffers_to_ignore",
    ): "users' modules carry it, by torch's convention",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names_of_ddp() -> set[str]:
    """Private methods of the class, and private attributes that it sets or reads on itself or leaves on modules."""
    tree = ast.parse(inspect.getsource(distributed))
    (ddp,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "DistributedDataParallel"]
    methods = {node.name for node in ast.walk(ddp) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    attributes = {
        node.attr
        for node in ast.walk(ddp)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "module")
    }
    of_modules = set(nn.Module.__dict__) | set(vars(nn.Module()))  # every module has these, DDP or not
    return {name for name in methods | attributes if is_private(name)} - of_modules


def uses(source: str, names: set[str]) -> Iterator[tuple[int, str]]:
    """Lines of ``source`` with an attribute, a definition or a text of one of these names, or a private import."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in names:
            yield node.lineno, node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name in names:
            yield node.lineno, node.name
        elif isinstance(node, ast.Constant) and node.value in names:  # getattr(ddp, "_name")
            yield node.lineno, str(node.value)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(MODULE):
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))


def test_no_other_file_uses_a_private_name_of_ddp() -> None:
    names = private_names_of_ddp()
    found = [
        f"{path.relative_to(SOURCE)}:{line} {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path != ALLOWED
        for line, name in uses(path.read_text(encoding="utf-8"), names)
        if (str(path.relative_to(SOURCE)), name) not in EXCEPTIONS
    ]
    assert not found, "move these to ddp/reducer.py, or rename our own"


def test_the_names_are_those_that_the_reducer_room_needs() -> None:
    names = private_names_of_ddp()
    assert {"_pre_forward", "_post_forward", "_sync_buffers", "_comm_hooks", "_ddp_init_helper"} <= names
    used = {name for _, name in uses(ALLOWED.read_text(encoding="utf-8"), names)}
    assert {"_build_params_for_reducer", "_remove_autograd_hooks", "_comm_hooks"} <= used


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ("def f(ddp):\n    return ddp._comm_hooks", "_comm_hooks"),
        ("def f(ddp):\n    return getattr(ddp, '_sync_buffers')()", "_sync_buffers"),
        ("class Mine:\n    def _pre_forward(self): ...", "_pre_forward"),
        (f"from {MODULE} import _DDPSink", "_DDPSink"),
    ],
)
def test_a_bad_example_is_found(bad: str, name: str) -> None:
    assert [found for _, found in uses(bad, private_names_of_ddp())] == [name]


def test_public_names_and_our_own_are_no_finding() -> None:
    good = f"from {MODULE} import DistributedDataParallel\ndef f(ddp):\n    ddp.reducer, ddp._tuner, ddp.static_graph"
    assert not list(uses(good, private_names_of_ddp()))
