"""A short campaign: one case of every class of faults ends well, and a campaign repeats from its seed."""

from collections.abc import Sequence
from itertools import islice
from math import inf
from pathlib import Path

import pytest

from soak import links
from soak.campaign import Campaign, Result, drawn, run_campaign
from soak.case import Case
from soak.faults import FAULTS, NEEDS_ROOT, ROWS
from soak.judge import GOOD, Verdict
from soak.report import counts, details, table, write_report
from soak.selection import BRIEF, SELECTION
from soak.world import Server

JOBS = 5


def check_that_all_end_well(cases: Sequence[Case], folder: Path) -> None:
    with Server() as server:
        results = run_campaign(Campaign(server, folder), iter(cases), len(cases), inf, JOBS, lambda _: None)
    assert len(results) == len(cases)
    # A busy machine may miss a deadline once; run again, alone, a case must end well.
    assert all(result.verdict.good or set(result.again) <= set(GOOD) for result in results), details(results)
    assert not any(path.name.startswith("rank") for path in folder.iterdir()), "folders are cases"


@pytest.mark.slow
def test_a_brief_campaign_ends_well(tmp_path: Path) -> None:
    assert set(BRIEF) <= set(SELECTION)
    check_that_all_end_well([Case.parse(text) for text in BRIEF], tmp_path)


@pytest.mark.campaign
@pytest.mark.xdist_group("lab")  # it makes network namespaces, and a lab looks at those of the machine
def test_one_case_of_every_class_ends_well(tmp_path: Path) -> None:
    cases = [Case.parse(text) for text in SELECTION]
    assert {case.kind.row for case in cases} == set(ROWS)
    rootless = bool(links.problem())
    check_that_all_end_well([case for case in cases if not rootless or case.kind.scenario not in NEEDS_ROOT], tmp_path)


def test_a_seed_draws_the_same_cases_again_and_every_fault_in_a_round() -> None:
    first, again, other = (list(islice(drawn(seed), 2 * len(FAULTS))) for seed in (3, 3, 4))
    assert first == again != other
    assert {case.fault for case in first[: len(FAULTS)]} == set(FAULTS)
    assert all(Case.parse(str(case)) == case and case.kind.suits(case.configuration) for case in first)


def test_the_table_counts_every_case_once_and_names_what_is_not_good(tmp_path: Path) -> None:
    kill, nan = Case.parse("kill-any/oktopk/2/0/measuring/exit"), Case.parse("nan/default/3/1/4/close")
    results = [
        Result(kill, Verdict("clear error", stage="measuring")),
        Result(kill, Verdict("hang", "rank 1 has not ended", "trying"), ("hang", "clear error")),
        Result(nan, Verdict("crash", "rank 0 was ended by signal 6", as_ddp=True)),
    ]
    assert counts(results) == {
        "killed": {"clear error": 1, "hang": 1},
        "NaN, inf or huge gradients": {"as stock DDP": 1},
    }
    assert "| **all** | 3 | 1 | 0 | 1 | 0 | 0 | 0 | 0 | 0 | 1 |" in table(results)
    assert details(results).count("make soak CASE=") == 1 and f"CASE={kill}" in details(results)
    report = write_report(tmp_path, results, 7, 60.0, "").read_text()
    assert "# 3 injected faults" in report and "make soak FAULTS=3 SEED=7" in report
