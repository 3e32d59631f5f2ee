"""The campaign's results as a table, as markdown and as JSON."""

import json
import os
import platform
import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from anabranch.values.version import __version__
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


def in_gloos_words(results: Sequence[Result]) -> str:
    """How many clear errors were Gloo's own on some survivor, and where they were raised."""
    raw = [result.verdict.raw for result in results if result.verdict.outcome == "clear error" and result.verdict.raw]
    places = Counter(place.split(" in ")[-1] for found in raw for place in set(found))
    return f"{len(raw)} of the clear errors were Gloo's own words on some survivor ({_listed(places) or 'none'})."


def markdown(results: Sequence[Result], seed: int, seconds: float, skipped: str) -> str:
    """The report."""
    stages = Counter(result.verdict.stage for result in results)
    configurations = Counter(result.case.configuration for result in results)
    worlds = Counter(result.case.ranks for result in results)
    slowest_s = max((result.verdict.over_s for result in results), default=0.0)
    return "\n".join(
        [
            f"# {len(results)} injected faults",
            "",
            f"{datetime.now(UTC):%Y-%m-%d}, seed {seed}, {seconds:.0f} s; "
            f"{', '.join(f'{name} {version}' for name, version in versions().items())}; Gloo, timeout {TIMEOUT_S:g} s. "
            f"A survivor hangs if it has not ended {GRACE_S:g} s (on a busy machine up to three times as "
            f"long, and timeouts, too) after the timeout; the slowest ended {slowest_s:.1f} s after it.",
            *([f"Links were not changed: {skipped}."] if skipped else []),
            "",
            table(results),
            "",
            in_gloos_words(results),
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


def write_report(folder: Path, results: Sequence[Result], seed: int, seconds: float, skipped: str) -> Path:
    """Write soak_<machine>_<date>.md into a folder, and every case with its outcome as JSON beside it."""
    words = [word for word in re.findall("[a-z]+", _processor().lower()) if word not in ("amd", "intel", "r", "cpu")]
    path = folder / f"soak_{(words or ['machine'])[0]}_{datetime.now(UTC):%Y-%m-%d}.md"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown(results, seed, seconds, skipped))
    cases = [
        {"case": str(result.case), "outcome": verdict.outcome, "stage": verdict.stage, "end_s": round(verdict.end_s, 2)}
        | ({} if verdict.outcome in GOOD else {"why": verdict.why, "as_ddp": verdict.as_ddp, "again": result.again})
        for result in results
        for verdict in [result.verdict]
    ]
    document = {"seed": seed, "seconds": round(seconds), "versions": versions(), "counts": counts(results)}
    lines = ",\n".join(json.dumps(case) for case in cases)
    path.with_suffix(".json").write_text(json.dumps(document)[:-1] + f', "cases": [\n{lines}\n]}}\n')
    return path


def versions() -> dict[str, str]:
    """What the campaign ran with."""
    return {
        "anabranch": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores of {_processor()}",
    }


def _listed(counter: Counter[object] | Counter[str] | Counter[int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items(), key=lambda item: -item[1]))


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
