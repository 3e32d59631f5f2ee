"""The command of the campaign: ``python -m soak``."""

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

from soak import links
from soak.campaign import Campaign, Result, drawn, run_campaign
from soak.case import Case
from soak.faults import FAULTS, NEEDS_ROOT
from soak.report import markdown, write_report
from soak.world import Server


def main() -> int:
    """Run a campaign or one case; 0 if every outcome is good."""
    options = _options()
    began = time.monotonic()
    skipped = links.problem()
    names = [name for name in options.only or FAULTS if not skipped or FAULTS[name].scenario not in NEEDS_ROOT]
    if skipped:
        print(f"No faults of links and disks: {skipped}")
    given = [Case.parse(text) for text in options.case for _ in range(options.times)]
    cases = iter(given) if given else drawn(options.seed, names)
    with Server() as server, tempfile.TemporaryDirectory(prefix="anabranch-soak-") as scratch:
        campaign = Campaign(server, Path(options.keep or scratch))
        counts: Counter[str] = Counter()

        def on_result(result: Result) -> None:
            counts[result.verdict.outcome] += 1
            told = sum(counts.values()) % 25 == 0 or not result.verdict.good
            if told or options.case:
                print(f"{time.monotonic() - began:6.0f} s  {dict(counts)}  {result.case}", flush=True)

        results = run_campaign(campaign, cases, len(given) or options.faults, options.seconds, options.jobs, on_result)
    print(markdown(results, options.seed, time.monotonic() - began, skipped))
    if options.report:
        path = write_report(Path(options.report), results, options.seed, time.monotonic() - began, skipped)
        print(f"The report is in {path}.")
    return int(not all(result.verdict.good for result in results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m soak", description="A seeded campaign of faults.")
    parser.add_argument("--seconds", type=float, default=1500.0, help="no case starts later")
    parser.add_argument("--faults", type=int, default=100_000, help="how many cases at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=6, help="cases at a time: most of them wait for a timeout")
    parser.add_argument("--only", action="append", choices=list(FAULTS), help="this fault; may be repeated")
    parser.add_argument("--case", action="append", default=[], help="run this case alone; may be repeated")
    parser.add_argument("--times", type=int, default=1, help="how often to run each --case")
    parser.add_argument("--report", default="", help="a folder for the report")
    parser.add_argument("--keep", default="", help="a folder for the journals of cases that did not end well")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
