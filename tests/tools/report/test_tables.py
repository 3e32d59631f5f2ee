"""Reports fit 80 columns, and their text is text on a real terminal too."""

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from anabranch import Bucket, Network, Plan, TensorSpec, Trace, simulate
from anabranch.tools.report.comparison import best, comparison_report
from anabranch.tools.report.documents import CompareDocument, ComparedPlanner, Durations
from anabranch.tools.report.figures import planned_buckets, timeline_figures
from anabranch.tools.report.scaling import scaling_report
from anabranch.tools.report.tables import (
    MAX_ROWS,
    bucket_table,
    duration_pairs,
    facts,
    network_report,
    plan_report,
    terminal,
    timeline_report,
    trace_report,
)
from tools.report.scalings import scaling_of

NAME = "[red]\x1b[2J:smile:" + "transformer.h.11.attention.query.weight"
TRACE = Trace(tuple(TensorSpec(f"{NAME}.{k}", 10**7, 4, 0.01 * k, "float32") for k in range(300)), 1.0, {NAME: NAME})
NETWORK = Network.measured(512, [(1 << k, 1e-3 + (1 << k) * 1e-9, 1e-4) for k in range(10, 31)], meta={NAME: NAME})
PLAN = Plan(tuple(Bucket((t.name,), k % 3) for k, t in enumerate(TRACE.tensors)))
TIMELINE = simulate(TRACE, PLAN, NETWORK)
KINDS = ("int8", "oktopk:0.01@nodes", "dense", "oktopk:0.01")
COMPRESSED_PLAN = Plan(tuple(replace(bucket, collective=KINDS[k % 4]) for k, bucket in enumerate(PLAN.buckets)))


def row(name: str, iteration_s: float, **more: Any) -> ComparedPlanner:
    """A row of a comparison in which only the name and the times matter."""
    return ComparedPlanner(
        name, name, {}, "f", 1234, 4, iteration_s, iteration_s, iteration_s, 0.5, 1.0, 12.345, **more
    )


def compared(dense: Sequence[str], compressed: Sequence[str] = ()) -> CompareDocument:
    """A comparison on a network with a measured spread."""
    rows, more = (
        tuple(row(name, 1.5, iteration_low_s=1.0, iteration_high_s=2.0) for name in names)
        for names in (dense, compressed)
    )
    return CompareDocument(
        world_size=4, forward_s=0.1, backward_s=0.2, best=dense[0], rows=rows, compressed=more, assumptions=("costs",)
    )


NAMES = ("per_tensor", "by_bytes", "mgwfbp", "optimal", "lanes", "asc", "int8@nodes", "oktopk:0.01@nodes")
SCALING = scaling_of(
    {name: {4: 0.1, 2048: 4.0} for name in NAMES}, sparse=["oktopk:0.01@nodes"], quantised=["int8@nodes"], network=NAME
)
REPORTS: dict[str, Sequence[RenderableType]] = {
    "trace": trace_report(TRACE),
    "network": network_report(NETWORK),
    "plan": plan_report(PLAN),
    "timeline": timeline_report(TIMELINE),
    "buckets": [terminal(bucket_table("Buckets", planned_buckets(dict(enumerate(PLAN.buckets)), TIMELINE, TRACE)))],
    "compressed buckets": [
        terminal(bucket_table("Buckets", planned_buckets(dict(enumerate(COMPRESSED_PLAN.buckets)), TIMELINE, TRACE)))
    ],
    "durations": [
        facts("Durations", [*duration_pairs(Durations(**timeline_figures(TIMELINE))), ("fingerprint", "f" * 64)])
    ],
    "comparison": comparison_report(compared(("per_tensor", "horovod", "optimal"), ("int8", "oktopk:0.01@nodes"))),
    "scaling": scaling_report(SCALING),
}


def rendered(report: Sequence[RenderableType], width: int, terminal: bool = False) -> str:
    """What a console of this width shows, markup switched on."""
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=terminal, color_system="truecolor" if terminal else None).print(
        *report, sep="\n"
    )
    return file.getvalue()


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS.keys())
def test_80_columns_hold_all_of_it(report: Sequence[RenderableType]) -> None:
    narrow, wide = rendered(report, 80), rendered(report, 240)
    assert max(map(len, narrow.splitlines())) <= 80
    # A drawing has as many characters as there is room for; every number of a table must still be there.
    numbers = [word for word in wide.split() if len(word) < 12 and word.replace(".", "").replace(",", "").isdigit()]
    assert numbers and all(number in narrow for number in numbers)


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS.keys())
def test_no_text_acts_on_a_terminal(report: Sequence[RenderableType]) -> None:
    shown = rendered(report, 240, terminal=True)
    assert "\x1b[2J" not in shown and "\x1b[31m" not in shown and "😄" not in shown


def test_buckets_are_shown_with_their_kind_and_what_is_sent() -> None:
    shown = rendered(REPORTS["compressed buckets"], 120)
    line = next(line.split() for line in shown.splitlines() if line.startswith(("  0", "0 ")))
    assert "int8" in line and "19.4" in line  # of 38.1 MiB: twice a quarter, and its scales
    words = " ".join(shown.split())
    assert "rows more: --json lists all. Sparse buckets are taken to send 8 bytes an entry, as fp32" in words
    assert "a plan does not say OkTopk's wire" in words


def test_what_a_way_that_chooses_has_chosen_is_said() -> None:
    found = compared(("optimal",), ("int8",))
    mix = replace(row("auto", 1.0, kinds={"dense": 0.25, "int4": 0.75}, error=0.0168751), planner="least_lossy")
    shown = " ".join(rendered(comparison_report(replace(found, compressed=(*found.compressed, mix))), 80).split())
    assert "auto 1,234 0.017" in shown and "Shares of the values: auto: dense 25.0%, int4 75.0%." in shown
    assert "exact plan" in shown and "least lossy plan" in shown
    old = " ".join(rendered(comparison_report(found), 80).split())  # of a file without errors
    assert "int8 1,234 – " in old and "Shares" not in old


def test_a_long_list_says_what_it_leaves_out() -> None:
    assert f"and {300 - MAX_ROWS} rows more" in rendered(REPORTS["plan"], 120)


def test_best_prefers_fewer_lanes_among_equals() -> None:
    first, second = row("first", 1.0), row("second", 1.0)
    assert best([first, second]) is first
    assert best([row("slow", 2.0), second]) is second


def test_the_error_stands_beside_the_best_compressed_strategy() -> None:
    names = {name: dict.fromkeys((4, 16, 64, 1024), 0.1) for name in ("by_bytes", "int8")}
    scaling = scaling_of(names, quantised=["int8"])
    assert "e-05" not in rendered(scaling_report(scaling), 80)  # as in files of older versions
    told = [replace(p, error=81e-6 if p.planner == "int8" else 0.0) for p in scaling.points]
    shown = " ".join(rendered(scaling_report(replace(scaling, points=tuple(told))), 80).split())
    assert shown.count("8.1e-05") == len(scaling.world_sizes) and "Error: the expected squared error" in shown
