"""The campaign's results as a table, as markdown and as JSON."""

import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from anabranch.version import __version__
from soak.campaign import Result
from soak.faults import ROWS, TIMEOUT_S
from soak.judge import BAD, GOOD
from soak.world import GRACE_S

COLUMNS = (*GOOD, *BAD)
HEADS = {"clear error": "clear error on all survivors", "trained on": "trained on correctly"}


def counts(results: Sequence[Result]) -> dict[str, Counter[str]]:
    """Outcomes by class of fault; what stock DDP does, too, is counted as "as DDP"."""
    found: dict[str, Counter[str]] = {row: Counter() for row in ROWS}
    for result in results:
        verdict = result.verdict
        found[result.case.kind.row]["as stock DDP" if verdict.as_ddp else verdict.outcome] += 1
    return {row: counter for row, counter in found.items() if counter}


def table(results: Sequence[Result]) -> str:
    """The table of outcomes, as markdown."""
    columns = [*COLUMNS, *(["as stock DDP"] if any(result.verdict.as_ddp for result in results) else [])]
    lines = ["| fault | cases | " + " | ".join(HEADS.get(column, column) for column in columns) + " |"]
    lines.append("|---|" + "---:|" * (len(columns) + 1))
    by_row = counts(results)
    total: Counter[str] = sum(by_row.values(), Counter())
    for row, counter in [*by_row.items(), ("**all**", total)]:
        cells = " | ".join(str(counter[column]) for column in columns)
        lines.append(f"| {row} | {counter.total()} | {cells} |")
    return "\n".join(lines)


def details(results: Sequence[Result]) -> str:
    """Each outcome that is not good, and the command that repeats it."""
    lines = []
    for result in results:
        if not result.verdict.good:
            verdict = result.verdict
            lines.append(f"* {verdict.outcome} ({verdict.stage}): {verdict.why}; again, alone: {result.again}")
            lines.append(f"  `make soak CASE={result.case}`")
    return "\n".join(lines) or "None."


def markdown(
    results: Sequence[Result], seed: int, seconds: float, skipped: str, details_only: bool = False
) -> str:
    """The report."""
    stages = Counter(result.verdict.stage for result in results)
    configurations = Counter(result.case.configuration for result in results)
    worlds = Counter(result.case.ranks for result in results)
    slowest = max((result.verdict.end_s for result in results), default=0.0)
    if details_only:
        return f"\nNot good:\n{details(results)}\nStages: {dict(stages.most_common())}\nSlowest end: {slowest:.1f} s"
    return "\n".join(
        [
            f"# {len(results)} injected faults",
            "",
            f"{datetime.now(UTC):%Y-%m-%d}, seed {seed}, {seconds:.0f} s; anabranch {__version__}, torch "
            f"{torch.__version__}, Python {platform.python_version()}; {_machine()}. Gloo, timeout {TIMEOUT_S:g} s. A "
            f"survivor hangs if it has not ended {GRACE_S:g} s (more on a busy machine) after the timeout; the slowest "
            f"took {slowest:.1f} s.",
            *([f"Links were not changed: {skipped}."] if skipped else []),
            "",
            table(results),
            "",
            "## Where the faults struck",
            "",
            f"Ranks: {_listed(worlds)}.",
            "",
            f"Stages: {_listed(stages)}.",
            "",
            f"Configurations: {_listed(configurations)}.",
            "",
            "## Outcomes that are not good",
            "",
            details(results),
            "",
            f"Repeat it: `make soak FAULTS={len(results)} SEED={seed}`.",
            "",
        ]
    )


def write_report(path: Path, results: Sequence[Result], seed: int, seconds: float, skipped: str) -> None:
    """Write the markdown, and every case with its verdict as JSON beside it."""
    path.write_text(markdown(results, seed, seconds, skipped))
    cases = [{"case": str(result.case), **asdict(result.verdict), "again": result.again} for result in results]
    path.with_suffix(".json").write_text(json.dumps({"seed": seed, "cases": cases}, indent=1))


def _listed(counter: Counter[object] | Counter[str] | Counter[int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items(), key=lambda item: -item[1]))


def _machine() -> str:
    names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}"
