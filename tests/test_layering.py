"""Who imports whom, and the shape of the source: architecture.md §3 and §5, read from the syntax trees."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import anabranch
from ranks import patience

SRC = Path(anabranch.__file__).parent
MAX_NAMES = 14  # at the top of src/anabranch
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60

# Each room, and the rooms above it in this table that it may import; its own is always allowed.
MAY_IMPORT = {
    "values": "",
    "planning": "values",
    "exchange": "values planning",
    "observe": "values exchange",
    "tuning": "values planning exchange observe",
    "ddp": "values exchange observe",
    "lean": "values planning exchange observe tuning ddp",
    "fsdp": "values planning exchange observe tuning",
    "parallel": "values planning exchange observe tuning ddp lean fsdp",
    "frameworks": "values planning exchange observe tuning ddp lean fsdp parallel",
    "tools": "values planning exchange observe tuning ddp lean fsdp parallel frameworks",
}
FRONT_DOOR = {"__init__", "__main__", "run"}  # may import everything
NEVER_TORCH = ("values", "planning", "tools.report", "tools.lab")  # not even in a function
INSIDE_TORCH = ("tools.lab.emulation", "tools.lab.inside")  # in the place of torch's process groups or their methods
# Packages of which no module loads torch, directly or not: planning and looking need none. Of the lab, its entry.
LOAD_NO_TORCH = ("values", "planning", "fsdp.planning", "tools.report", "tools.cli", "tools.lab.launch")


@cache
def trees() -> dict[str, ast.Module]:
    """Every module by its name under anabranch: "planning.merge", and "planning.__init__" for a folder's own file."""
    return {
        ".".join(path.relative_to(SRC).with_suffix("").parts): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(SRC.rglob("*.py"))
    }


def imports(tree: ast.AST) -> Iterator[str]:
    """The full name of every imported module; not of those that only type checkers import from other libraries."""
    for_types = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.If) and isinstance(outer.test, ast.Name) and outer.test.id == "TYPE_CHECKING"
        for node in ast.walk(outer)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
            if node.module == "anabranch":  # from anabranch import planning
                names = [f"anabranch.{alias.name}" for alias in node.names]
        yield from (name for name in names if id(node) not in for_types or name.startswith("anabranch"))


def is_in(module: str, *packages: str) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def forbidden_imports(module: str, tree: ast.AST) -> list[str]:
    """What this module imports and may not."""
    room = module.partition(".")[0]
    if room not in MAY_IMPORT and room not in FRONT_DOOR:
        return [f"{room} has no row in MAY_IMPORT"]
    torch_free = is_in(module, *NEVER_TORCH) and not is_in(module, *INSIDE_TORCH)
    allowed = ("", room, *MAY_IMPORT.get(room, "").split())

    def is_bad(name: str) -> bool:
        root, _, rest = name.partition(".")
        if root == "anabranch":
            return room not in FRONT_DOOR and rest.partition(".")[0] not in allowed
        return root == "" or (root == "torch" and torch_free)  # imports are absolute

    return [name for name in imports(tree) if is_bad(name)]


def package_graph() -> dict[str, set[str]]:
    """Which room imports which others; of exchange and tools, which part: the table of rooms sees no cycle in those."""

    def package(module: str) -> str:
        parts = module.split(".")
        return ".".join(parts[:2]) if parts[0] in ("exchange", "tools") else parts[0]

    graph: dict[str, set[str]] = {}
    for module, tree in trees().items():
        if module not in FRONT_DOOR:
            wanted = {package(name.partition(".")[2]) for name in imports(tree) if name.startswith("anabranch.")}
            graph.setdefault(package(module), set()).update(wanted - {package(module)})
    return graph


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """One cycle as a list of its members; empty where there is none."""
    done: set[str] = set()

    def search(node: str, path: list[str]) -> list[str]:
        if node in path:
            return path[path.index(node) :]
        if node in done:
            return []
        for neighbour in sorted(graph.get(node, ())):
            if found := search(neighbour, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := search(node, []))), [])


def test_the_top_has_few_names() -> None:
    names = {path.name for path in SRC.iterdir()} - {"__pycache__", "py.typed"}
    assert len(names) <= MAX_NAMES, sorted(names)


def test_imports_follow_the_table() -> None:
    rooms = list(MAY_IMPORT)
    assert all(set(allowed.split()) <= set(rooms[: rooms.index(room)]) for room, allowed in MAY_IMPORT.items())
    found = {module: bad for module, tree in trees().items() if (bad := forbidden_imports(module, tree))}
    assert found == {}


def test_packages_form_no_cycle() -> None:
    assert cycle_in(package_graph()) == []


def test_planning_and_looking_load_no_torch() -> None:
    modules = [module.removesuffix(".__init__") for module in trees() if is_in(module, *LOAD_NO_TORCH)]
    assert all(any(is_in(module, package) for module in modules) for package in LOAD_NO_TORCH)
    code = (
        "import importlib, sys\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module('anabranch.' + module)\n"
        "    if 'torch' in sys.modules: sys.exit(module + ' loads torch')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *modules], capture_output=True, text=True, timeout=100 * patience(), check=False
    )
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------------ shape

DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
PICKLING = {"gather_object", "all_gather_object", "scatter_object_list", "broadcast_object_list", "send_object_list"}


def long_functions(tree: ast.Module) -> list[str]:
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


def undocumented(tree: ast.Module) -> list[str]:
    """Public classes and functions without a docstring, or with one that only points elsewhere; "module" for itself.

    Methods are free: one whose name says it all, or that implements a contract written elsewhere, needs none.
    """
    found = [] if ast.get_docstring(tree) else ["module"]
    for node in tree.body:
        if isinstance(node, DOCUMENTED) and not node.name.startswith("_") and not ast.get_docstring(node):
            found.append(node.name)
    everything = (node for node in ast.walk(tree) if isinstance(node, DOCUMENTED))
    return found + [node.name for node in everything if (ast.get_docstring(node) or "").startswith("See ``")]


def dangers(tree: ast.AST) -> list[str]:
    """Anything that would run what a file or another rank says."""
    found = [name for name in imports(tree) if name.partition(".")[0] in FORBIDDEN_MODULES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            found.append(node.func.id)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PICKLING:
            found.append(node.func.attr)
    return found


def test_files_and_functions_are_short() -> None:
    lines = {str(path.relative_to(SRC)): len(path.read_text("utf-8").splitlines()) for path in SRC.rglob("*.py")}
    assert {path: count for path, count in lines.items() if count > MAX_FILE_LINES} == {}
    assert {module: found for module, tree in trees().items() if (found := long_functions(tree))} == {}


def test_everything_public_is_documented() -> None:
    assert {module: found for module, tree in trees().items() if (found := undocumented(tree))} == {}


def test_no_file_can_run_code() -> None:
    assert {module: found for module, tree in trees().items() if (found := dangers(tree))} == {}


# --------------------------------------------------------------------------------------------- the checkers


def test_the_checkers_see_bad_imports_and_let_good_ones_pass() -> None:
    bad = {
        "values.trace": ["import anabranch.planning.merge", "from .plan import Plan", "def f():\n    import torch"],
        "planning.merge": [
            "from anabranch import tools",
            "import torch.nn as nn",
            "from anabranch.ddp.layout import f",
        ],
        "observe.clock": ["from anabranch.planning import optimal"],
        "tuning.tuner": ["from anabranch.lean.layout import LeanLayout", "def f():\n    import anabranch.ddp.layout"],
        "lean.engine": ["from anabranch.fsdp.watch import watch", "from anabranch.parallel import DataParallel"],
        "parallel": ["from anabranch.tools.bench.zoo import MODELS"],
        "tools.lab.hosts": ["import torch", "from anabranch.run import main"],
        "helpers": ["import json"],
    }
    good = {
        "values.plan": ["from anabranch.values.trace import Trace\nimport json"],
        "planning.search": ["from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"],
        "exchange.lanes": ["import torch.distributed as dist\nfrom anabranch.planning.prices import price"],
        "parallel": ["from anabranch.planning import optimal", "from anabranch.tuning import tuner"],
        "tools.lab.emulation.group": ["import torch\nfrom anabranch.values.links import AlphaBeta"],
        "run": ["from anabranch.tools.cli.main import main"],
    }
    assert all(forbidden_imports(module, ast.parse(source)) for module, sources in bad.items() for source in sources)
    assert not any(forbidden_imports(name, ast.parse(source)) for name, sources in good.items() for source in sources)
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert {"values", "planning", "exchange.sparse", "tools.cli"} <= set(package_graph())


def test_the_checkers_see_bad_shapes() -> None:
    bad = ast.parse("import pickle\nfrom marshal import loads\neval('1')\nexec('')\ndist.gather_object(1)")
    assert dangers(bad) == ["pickle", "marshal", "eval", "exec", "gather_object"]
    bare = ast.parse("def f(): ...\nclass A:\n    def g(self): ...\n    def _h(self): ...")
    assert undocumented(bare) == ["module", "f", "A"]
    assert undocumented(ast.parse('"""M."""\ndef f():\n    """See ``g``."""\ndef g():\n    """Add one."""')) == ["f"]
    assert long_functions(ast.parse("def f():\n" + "    f()\n" * MAX_FUNCTION_LINES)) == ["f"]
    assert not long_functions(ast.parse("def f():\n" + "    f()\n" * (MAX_FUNCTION_LINES - 1)))
