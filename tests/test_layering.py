"""Who imports whom, and the shape of the source: architecture.md §3 and §5, read from the syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import anabranch

SRC = Path(anabranch.__file__).parent
FILES = sorted(SRC.rglob("*.py"))
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60

BASE = {"errors", "checks", "extras", "seams", "quantities"}
NOUNS = {*BASE, "kinds", "fidelity", "trace", "alpha_beta", "curve", "network", "plan", "timeline"}
EVERYTHING = {"*"}
LIBRARY = {
    *NOUNS, "exchange_cost", "version", "files", "network_presets", "profiler_trace", "sim", "planners", "sharded",
    "scaling", "footprint", "comm", "observe", "quantised", "sparse", "auto", "compression", "activations", "lean",
    "ddp", "compiled", "tuning", "wrapping", "parallel", "lean_parallel", "integrations",
}  # fmt: skip
MODELS_OF_KINDS = {  # no torch in them
    "sparse.naming", "sparse.sizes", "sparse.cost_model", "sparse.options", "quantised.block_format",
    "quantised.cost_model", "quantised.options",
}  # fmt: skip

# Part (a module, else its nearest folder) → the parts of anabranch it may import; its own folder is always allowed.
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": EVERYTHING,  # the front door
    "__main__": EVERYTHING,
    "version": set(),
    "errors": set(),
    "checks": {"errors"},
    "extras": {"errors"},
    "seams": set(),
    "quantities": set(),
    "kinds": set(),
    "trace": {*BASE, "kinds"},
    "timeline": BASE,
    "alpha_beta": BASE,
    "curve": BASE,
    "network": {*BASE, "alpha_beta", "curve"},
    "plan": {*BASE, "trace"},
    "fidelity": {"kinds", "trace", "plan", "sparse.naming"},
    "auto": {*NOUNS, "sparse.options"},
    "exchange_cost": {*BASE, "alpha_beta", "curve", "network"},
    "network_presets": {*BASE, "alpha_beta", "curve", "network"},
    "files": NOUNS,
    "profiler_trace": {*NOUNS, "files"},
    "sim": NOUNS,
    "planners": {*NOUNS, "sim"},
    "sharded": {*NOUNS, "files"},
    "scaling": {*NOUNS, "files", "network_presets", "sim", "planners", "sharded", "exchange_cost", *MODELS_OF_KINDS},
    "footprint": {*NOUNS, "sharded", "scaling", *MODELS_OF_KINDS},  # the account of memory, for lean and for estimate
    # The library, from messages up to the wrappers.
    "comm": {*NOUNS, "files"},
    "observe": {*NOUNS, "files", "comm"},
    "quantised": {*NOUNS, "exchange_cost", "comm"},
    "sparse": {*NOUNS, "exchange_cost", "comm", "quantised"},  # its int8 and its dtypes are theirs
    "compression": {*NOUNS, "auto", "footprint", "comm", "quantised", "sparse"},
    "activations": {*NOUNS, "footprint", "observe"},
    "ddp": {*NOUNS, "comm", "observe"},
    "compiled": {*NOUNS, "ddp"},
    "lean": {*NOUNS, "footprint", "comm", "observe", "activations"},
    "tuning": {*NOUNS, "version", "files", "planners", "sim", "comm", "observe"},  # cached plans note the version
    "wrapping": {*NOUNS, "comm", "ddp", "tuning"},
    "parallel": LIBRARY,  # the composition roots
    "lean_parallel": LIBRARY,
    "integrations": LIBRARY,
    # Tools: nothing above imports them.
    "estimate": LIBRARY,
    "lab": {"errors", "extras"},
    "lab.emulation": {*BASE, "alpha_beta"},
    "bench": {*LIBRARY, "estimate", "report", "lab"},  # a benchmark notes in which lab it ran, at which rate
    "report": {*NOUNS, "files", "scaling"},
    "report.html": {*NOUNS, "version", "scaling"},  # a page says which version made it
    "reproduce": {*LIBRARY, "estimate", "bench"},  # whatever a paper's figures need
    "demo": EVERYTHING,
    "cli": EVERYTHING,
    "run": {"cli"},
}
TORCH_AT_MODULE_LEVEL = {
    "comm",
    "observe",
    "quantised",
    "sparse",
    "compression",
    "activations",
    "ddp",
    "compiled",
    "lean",
    "tuning",
    "wrapping",
    "parallel",
    "lean_parallel",
    "integrations",
    "estimate",
    "bench",
    "demo",
    "lab.emulation.group",
    "reproduce.oktopk_counts",
}
TORCH_NEVER = {
    *NOUNS,
    "exchange_cost",
    "network_presets",
    "profiler_trace",
    "files",
    "sim",
    "planners",
    "sharded",
    "scaling",
    "footprint",
    "report",
    "lab",
}
TORCH_FREE_MODULES = {*MODELS_OF_KINDS, "tuning.plan_cache"}  # of folders that import torch


def module_of(path: Path) -> str:
    """ "sim.iteration" for sim/iteration.py, "sim.__init__" for the folder's own file."""
    return ".".join(path.relative_to(SRC).with_suffix("").parts)


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Every imported module with its full name, and whether that happens as soon as the importing one is loaded."""
    lazy = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _only_for_types(outer)
        for node in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) not in lazy
        elif isinstance(node, ast.ImportFrom):
            yield ("." * node.level) + (node.module or ""), id(node) not in lazy
            if node.module == "anabranch":  # from anabranch import planners
                for alias in node.names:
                    yield f"anabranch.{alias.name}", id(node) not in lazy


def _only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def violations(module: str, tree: ast.AST) -> list[str]:
    """What this module imports and may not."""
    part = module.partition(".")[0]
    within = [module.rsplit(".", up)[0] for up in range(module.count(".") + 1)]  # itself, then its folders outwards
    allowed = next((MAY_IMPORT[name] for name in within if name in MAY_IMPORT), None)
    torch_at_once = not TORCH_AT_MODULE_LEVEL.isdisjoint(within) and module not in TORCH_FREE_MODULES
    if allowed is None:
        return [f"{module} has no rule: give it one in MAY_IMPORT"]
    found = []
    for name, at_once in imports(tree):
        root, _, rest = name.partition(".")
        if name.startswith("."):
            found.append(f"{module} imports {name}: imports are absolute")
        elif root == "torch" and not torch_at_once and (at_once or part in TORCH_NEVER):
            found.append(f"{module} imports {name}")
        elif root == "anabranch" and allowed != EVERYTHING:
            if not rest and part != "__init__":
                continue  # "from anabranch import x" is judged by x
            wanted = rest.partition(".")[0]
            if wanted != part and wanted not in allowed and rest not in allowed:
                found.append(f"{module} imports {name}")
    return found


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------------------- the checker


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("trace", "from anabranch.values.plan import Plan"),
        ("trace", "import anabranch.values.network"),
        ("plan", "from anabranch import network"),
        ("network", "from anabranch.planning.simulator.iteration import simulate"),
        ("sim.iteration", "from anabranch.planning import optimal"),
        ("sim.iteration", "def f():\n    from anabranch.planning import optimal"),
        ("sim.iteration", "def f():\n    import torch"),
        ("planners.merge", "import torch.nn as nn"),
        ("planners.merge", "from anabranch.values.files import load"),
        ("sharded.planner", "def f():\n    import torch"),
        ("sharded.step", "from anabranch.observe.measure import measure"),
        ("report.html", "from anabranch.planning.simulator import simulate"),
        ("comm.lanes", "from anabranch.planning import optimal"),
        ("comm.agree", "import anabranch.planning.simulator"),
        ("tuning.tuner", "from anabranch.ddp.layout import DdpLayout"),
        ("tuning.tuner", "from anabranch.lean.layout import LeanLayout"),
        ("tuning.tuner", "from anabranch.values.kinds.options import OkTopk"),
        ("lean.engine", "from anabranch.exchange.residuals.state import BucketState"),
        ("parallel", "from anabranch.tools.bench.zoo import MODELS"),
        ("sparse.oktopk", "from anabranch.parallel import DataParallel"),
        ("cli.plan", "import torch"),
        ("tuning.explain", "from anabranch.tools.lab.emulation.group import EmulatedGroup"),
        ("lab.emulation.settings", "def f():\n    import torch"),
        ("lab.emulation.link", "from anabranch.exchange.lanes import Lanes"),
        ("lab.hosts", "from anabranch.values.links import AlphaBeta"),
        ("files", "from .trace import Trace"),
    ],
)
def test_the_checker_sees_a_bad_import(module: str, source: str) -> None:
    found = violations(module, ast.parse(source))
    assert found and not any("no rule" in violation for violation in found)


def test_the_checker_sees_a_module_without_a_rule() -> None:
    assert "no rule" in violations("helpers", ast.parse("import json"))[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("plan", "from anabranch.values.trace import Trace\nimport json"),
        (
            "planners.merge",
            "from anabranch.planning.fixed import single\nfrom anabranch.planning.simulator import finish_s",
        ),
        ("cli.measure", "def run() -> None:\n    import torch"),
        ("cli.plan", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("comm.lanes", "import torch.distributed as dist"),
        ("sparse.oktopk", "from anabranch.exchange.lanes import Lanes\nimport torch"),
        ("parallel", "from anabranch.planning import optimal"),
        ("lab.emulation.group", "import torch\nfrom anabranch.values.links import AlphaBeta"),
    ],
)
def test_the_checker_lets_a_good_import_pass(module: str, source: str) -> None:
    assert violations(module, ast.parse(source)) == []


# --------------------------------------------------------------------------------------------------- the source


def ids(path: Path) -> str:
    return module_of(path)


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_imports_keep_to_their_layer(path: Path) -> None:
    assert violations(module_of(path), parsed(path)) == []


def package_of(module: str) -> str:
    """The folder directly under anabranch, or the module itself where it lies in none."""
    return module.partition(".")[0]


def package_graph() -> dict[str, set[str]]:
    """Which package imports which other, imports inside functions included; the front door aside."""
    graph: dict[str, set[str]] = {}
    for path in FILES:
        own = package_of(module_of(path))
        if own not in ("__init__", "__main__"):
            wanted = {
                name.removeprefix("anabranch.") for name, _ in imports(parsed(path)) if name.startswith("anabranch.")
            }
            graph.setdefault(own, set()).update({package_of(name) for name in wanted} - {own})
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


def test_the_checker_finds_a_cycle() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_packages_form_no_cycle() -> None:
    assert cycle_in(package_graph()) == []


def test_every_part_is_found() -> None:
    assert {"trace", "files", "sim.iteration", "planners.merge"} <= {module_of(path) for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_functions_are_short(path: Path) -> None:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno + 1 <= MAX_FUNCTION_LINES, node.name


DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def undocumented(tree: ast.Module) -> list[str]:
    """Public classes and functions without a docstring; the module itself as "module".

    Methods are free: one whose name says it all, or that implements a contract written elsewhere, needs none.
    """
    found = [] if ast.get_docstring(tree) else ["module"]
    for node in tree.body:
        if isinstance(node, DOCUMENTED) and not node.name.startswith("_") and not ast.get_docstring(node):
            found.append(node.name)
    return found


def riddles(tree: ast.Module) -> list[str]:
    """Docstrings that send the reader elsewhere instead of saying what the thing does."""
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED) and (ast.get_docstring(node) or "").startswith("See ``")
    ]


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_everything_public_is_documented(path: Path) -> None:
    assert undocumented(parsed(path)) == []


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_no_docstring_only_points_elsewhere(path: Path) -> None:
    assert riddles(parsed(path)) == []


FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def dangers(tree: ast.AST) -> list[str]:
    """Anything that would run what a file says."""
    found = [name for name, _ in imports(tree) if name.partition(".")[0] in FORBIDDEN_MODULES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            found.append(node.func.id)
    return found


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_no_file_can_run_code(path: Path) -> None:
    assert dangers(parsed(path)) == []


def test_these_checkers_see_bad_examples() -> None:
    assert dangers(ast.parse("import pickle\nfrom marshal import loads\neval('1')\nexec('')")) == [
        "pickle",
        "marshal",
        "eval",
        "exec",
    ]
    assert undocumented(ast.parse("def f(): ...\nclass A:\n    def g(self): ...\n    def _h(self): ...")) == [
        "module",
        "f",
        "A",
    ]
    assert riddles(ast.parse('def f():\n    """See ``g``."""\ndef g():\n    """Add one."""')) == ["f"]
