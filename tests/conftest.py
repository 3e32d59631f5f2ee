"""How every test runs: examples of hypothesis repeat, slow tests come first, and ``--quick`` takes a selection."""

import inspect
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported. The tensors of tests are small: a second thread only makes the first one wait for it.
os.environ["OMP_NUM_THREADS"] = "1"
# Before Triton is imported, as torch's compiler does: without a GPU kernels are tested in its interpreter.
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# For tests and the ranks and programs that they start: no test may read or write the user's plans.
os.environ["ANABRANCH_CACHE"] = "off"

TESTS = Path(__file__).parent
LAB = TESTS / "tools" / "lab"

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", settings.get_profile("repeatable"), derandomize=False, max_examples=1000)
QUICK_EXAMPLES = 15
settings.register_profile("quick", settings.get_profile("repeatable"), max_examples=QUICK_EXAMPLES)


def pytest_configure(config: pytest.Config) -> None:
    usual = "quick" if config.getoption("--quick") else "repeatable"
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", usual))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="the first case of every test that is not slow")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give tests that share a worker to one worker: those of an ``xdist_group``, and of a file with module fixtures.

    xdist writes the groups of ``_mark`` into node ids, and pytest 9.2 has node ids that nobody can write into, so that
    its --dist loadgroup groups nothing (xdist 3.8). This goes by the files' text: a marker holds for its whole file.
    """
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class Grouped(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path = config.rootpath / nodeid.partition("::")[0]
            return _group(path) or nodeid

    return Grouped(config, log) if config.getoption("dist") == "loadgroup" else None


@cache
def _group(path: Path) -> str:
    """The group of the tests in this file; empty if each of them may go to any worker."""
    if path.parent == LAB:
        return "lab"
    text = path.read_text(encoding="utf-8")
    groups = set(re.findall(r"""mark\.xdist_group\(["'](.+?)["']\)""", text))
    if len(groups) > 1:
        raise pytest.UsageError(f"{path} names the groups {', '.join(sorted(groups))}: expected one in a file")
    return groups.pop() if groups else str(path) if 'scope="module"' in text else ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: set[str] = set()  # functions whose first case is behind us
    for item in items:
        if isinstance(item, pytest.Function):
            _mark(item)
            function = re.sub(r"\[.*", "", item.nodeid)
            if item.get_closest_marker("campaign_but_first") and function in seen:
                item.add_marker("campaign")
            seen.add(function)
    if config.getoption("--quick"):
        long = {item for item in items if item.get_closest_marker("slow") or item.get_closest_marker("campaign")}
        chosen = _first_cases(item for item in items if item not in long)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
        for item in items:
            _give_few_examples(item)
    # So that no core waits for them in the end.
    items.sort(key=lambda item: 2 - bool(item.get_closest_marker("campaign")) - bool(item.get_closest_marker("slow")))


def _mark(item: pytest.Function) -> None:
    """Add ``slow`` to tests that start programs, ``campaign`` to a browser's, a group to tests that share a worker."""
    fixtures = [definitions[-1] for definitions in item._fixtureinfo.name2fixturedefs.values()]
    if "browser" in item.fixturenames:
        item.add_marker("campaign")
    if _reaches_subprocess([item.function, *(fixture.func for fixture in fixtures)]):
        item.add_marker("slow")
    if item.path.parent == LAB:  # a lab looks at all processes and network devices of the machine
        item.add_marker(pytest.mark.xdist_group("lab"))
    elif any(fixture.scope == "module" for fixture in fixtures):  # made once, not once per worker
        item.add_marker(pytest.mark.xdist_group(item.path.stem))


def _give_few_examples(item: pytest.Item) -> None:
    """Also where a test says how many examples hypothesis makes, which goes before the profile's number."""
    test: Any = getattr(item, "obj", None)
    given = getattr(test, "_hypothesis_internal_use_settings", None)
    if given is not None and given.max_examples > QUICK_EXAMPLES:
        test._hypothesis_internal_use_settings = settings(given, max_examples=QUICK_EXAMPLES)


def _first_cases(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """One case of each test function."""
    return list({re.sub(r"\[.*", "", item.nodeid): item for item in reversed(list(items))}.values())[::-1]


def _reaches_subprocess(functions: Iterable[object]) -> bool:
    """Whether these functions, or functions of the tests that they name, use the module ``subprocess``."""
    seen: set[FunctionType] = set()
    waiting = list(functions)
    while waiting:
        function = inspect.unwrap(waiting.pop())  # type: ignore[arg-type]
        if not isinstance(function, FunctionType) or function in seen:
            continue
        if not function.__code__.co_filename.startswith(str(TESTS)):
            continue
        seen.add(function)
        named = [function.__globals__.get(name) for name in _names(function.__code__)]
        if any(value is subprocess for value in named):
            return True
        waiting += named
    return False


def _names(code: CodeType) -> Iterator[str]:
    """The names that a function's code looks up, with those of functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
