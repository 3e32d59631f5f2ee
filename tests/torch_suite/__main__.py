"""``make torch-suite``: torch's own DDP tests under stock DDP and under DataParallel, compared."""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch_suite import suite
from torch_suite.suite import MODES, PASSED, Results

EXCEPTIONS = Path(__file__).with_name("exceptions.txt")
LINES = ("passes under both", "passes under stock DDP only", "fails under stock DDP", "skipped by torch")


def main() -> int:
    """Run the tests, print the table; 0 if every test that stock DDP passes is passed or a listed exception."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", help="parts of names; all tests if left out")
    parser.add_argument("--exact", action="store_true", help="the names are whole names")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    parser.add_argument("--logs", type=Path, help="keep the output of every test in this folder")
    options = parser.parse_args()
    suite.prepare()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        chosen = _chosen(suite.names(), options.tests, options.exact)
        results = suite.run_all(chosen, logs, options.jobs, _print_progress)
    print_table(results)
    print(f"{len(results)} tests in {time.monotonic() - start:.0f} s")
    return judge(results, exceptions(EXCEPTIONS.read_text()), not options.tests)


def exceptions(text: str) -> dict[str, str]:
    """Reasons by the names of tests."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: reason.strip() for name, _, reason in (line.partition(":") for line in lines)}


def print_table(results: Mapping[str, Results]) -> None:
    """Count the tests of the torch wheel, and those of our own, by how they ended."""
    counts = Counter((suite.of_torch(name), kind) for name, kind in suite.kinds(results))
    print(f"\n{'':30}{'of torch':>10}{'of ours':>10}")
    for line in LINES:
        print(f"{line:30}{counts[True, line]:>10}{counts[False, line]:>10}")
    print()


def judge(results: Mapping[str, Results], excused: Mapping[str, str], complete: bool) -> int:
    """Name each exception with its reason, and what is wrong; 1 if something is."""
    failed = {name for name, kind in suite.kinds(results) if kind == "passes under stock DDP only"}
    for name in sorted(failed & excused.keys()):
        print(f"exception: {name}: {excused[name]}")
    for name, reason in suite.LEFT_OUT.items() if complete else ():
        print(f"left out: {name}: {reason}")
    for name in sorted(results.keys() & excused.keys() - failed):
        print(f"no exception any more, take it out of {EXCEPTIONS.name}: {name}")
    unknown = sorted(excused.keys() - results.keys()) if complete else []
    for name in unknown:
        print(f"named in {EXCEPTIONS.name}, but there is no such test: {name}")
    for name in sorted(failed - excused.keys()):
        for mode, result in results[name].items():
            if result.outcome != PASSED:
                print(f"\n{name} fails under {mode}:\n{_last_lines(result.message)}")
    unexpected = failed - excused.keys()
    print(f"{len(unexpected)} tests fail that should pass" if unexpected else "every other test passes")
    return 1 if unexpected else 0


def _last_lines(message: str, count: int = 12) -> str:
    """The end of a traceback, which says what happened."""
    return "\n".join([line for line in message.splitlines() if line.strip()][-count:])


def _chosen(names: Sequence[str], wanted: Sequence[str], exact: bool) -> list[str]:
    return [name for name in names if not wanted or any(part == name if exact else part in name for part in wanted)]


def _print_progress(name: str, results: Results) -> None:
    ends = ", ".join(f"{results[mode].outcome} {results[mode].duration_s:.1f} s" for mode in MODES if mode in results)
    print(f"{name}: {ends}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
