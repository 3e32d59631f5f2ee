"""A benchmark's figures, as people and programs read them."""

from typing import Any

import pytest
from rich.console import Console

from anabranch.tools.report.benchmark import (
    benchmark_report,
    benchmark_table,
    closing_lines,
    markdown,
)
from anabranch.tools.report.documents import BenchDocument, Benchmark, BenchmarkRow, printed


def example(**changes: object) -> Benchmark:
    fields: dict[str, object] = {
        "model": "resnet50",
        "batch": 32,
        "unit": "img",
        "ranks": 4,
        "rows": (
            BenchmarkRow("compute only", (0.05, 0.05, 0.05)),
            BenchmarkRow("DDP", (0.1, 0.2, 0.1), 0.11, 5, 1),
            BenchmarkRow("DataParallel", (0.08, 0.16, 0.09), 0.085, 12, 2),
        ),
        "bound_s": 0.08,
        "explanation": "anabranch: running 2 lanes.",
        "facts": {"device": "NVIDIA H200", "network": "4 hosts, 25 Gbit/s"},
        "skipped": ("PowerSGD: it hangs on Gloo",),
    }
    return Benchmark(**(fields | changes))  # type: ignore[arg-type]


def figures(benchmark: Benchmark) -> dict[str, Any]:
    """What bench --json prints of one benchmark."""
    (found,) = printed(BenchDocument(benchmarks=(benchmark,)))["benchmarks"]
    assert isinstance(found, dict)
    return found


def shown(benchmark: Benchmark) -> str:
    console = Console(width=120, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(*benchmark_report(benchmark), sep="\n")
    return capture.get()


def test_ratios_are_taken_round_by_round() -> None:
    found = example()
    ours, ddp = found.row("DataParallel"), found.row("DDP")
    assert ours.ratio_to(ddp) == pytest.approx(0.8)  # 0.8, 0.8 and 0.9: the slow round slowed both
    assert ours.step_s == 0.09 and ddp.step_s == 0.1


def test_the_error_is_a_share_of_what_was_measured() -> None:
    assert example().row("DDP").prediction_error == pytest.approx(0.1)
    assert example().row("compute only").prediction_error is None


def test_figures_hold_everything_by_name() -> None:
    told = figures(example())
    ddp = next(row for row in told["rows"] if row["name"] == "DDP")
    assert ddp["turns_s"] == (0.1, 0.2, 0.1) and ddp["ratio_to_ddp"] == 1.0
    assert ddp["ratio_to_bound"] == pytest.approx(1.25) and ddp["prediction_error"] == pytest.approx(0.1)
    assert told["facts"]["network"] == "4 hosts, 25 Gbit/s" and told["bound_s"] == 0.08
    assert told["skipped"] == ("PowerSGD: it hangs on Gloo",)


def test_the_closing_lines_are_those_that_scripts_look_for() -> None:
    rates = [32 / 0.08, 32 / 0.16, 32 / 0.09]
    mean = sum(rates) / 3
    spread = 1.96 * (sum((rate - mean) ** 2 for rate in rates) / 2) ** 0.5
    assert closing_lines(example()) == [
        "DataParallel:",
        f"Img/sec per GPU: {mean:.1f} +-{spread:.1f}",
        f"Total img/sec on 4 GPU(s): {4 * mean:.1f} +-{4 * spread:.1f}",
    ]
    once = example(
        rows=(BenchmarkRow("DDP", (0.1,)), BenchmarkRow("DataParallel", (0.1,))),
        facts={"device": "CPU, x86_64"},
        unit="seq",
    )
    assert closing_lines(once)[1] == "Seq/sec per CPU: 320.0 +-0.0"


def test_the_table_shows_predicted_beside_measured() -> None:
    text = shown(example())
    row = next(line for line in text.splitlines() if line.startswith("* DataParallel"))
    for cell in ("12", "2", "90.0", "80.00 – 160.00", "0.800", "1.12", "85.00", "-5.6%"):
        assert cell in row
    assert "Left out: PowerSGD" in text and "25 Gbit/s" in text


def test_markdown_has_a_table_per_model_and_the_explanation() -> None:
    text = markdown("A title", [example(), example()])
    assert text.startswith("# A title\n") and text.count("| contestant |") == 2
    assert "| **DataParallel** | **12** | **2** |" in text
    assert "```\nanabranch: running 2 lanes.\n```" in text
    assert "* network: 4 hosts, 25 Gbit/s" in text and "Total img/sec on 4 GPU(s)" in text


def test_values_from_elsewhere_cannot_touch_the_terminal() -> None:
    assert "\x1b" not in shown(example(facts={"device": "x\x1b[2J"}, skipped=("\x1b[0m",), model="\x1b]0;"))


def test_what_passed_a_card_is_shown_where_it_is_known() -> None:
    assert "card" not in shown(example())
    counted = example(
        rows=(
            BenchmarkRow("DDP", (0.1,), card_nbytes=78.214e6),
            BenchmarkRow("DataParallel", (0.1,), card_nbytes=4.5e6),
        )
    )
    lines = markdown("A title", [counted]).splitlines()
    assert next(line for line in lines if line.startswith("| contestant")).endswith("| card MB | card / DDP |")
    assert next(line for line in lines if line.startswith("| DDP")).endswith("| 78.21 | 1.000 |")
    assert "network card in a step" in shown(counted)
    assert figures(counted)["rows"][1]["card_nbytes"] == 4.5e6


def test_the_head_line_says_how_many_ranks_hosts_have() -> None:
    assert ", 4 ranks, " in benchmark_table(example()).title
    assert ", 2 hosts × 2 ranks, " in benchmark_table(example(ranks_per_host=2)).title
    assert ", 1 host × 4 ranks, " in benchmark_table(example(ranks_per_host=4)).title


def test_a_benchmark_has_ddp_and_as_many_turns_for_all() -> None:
    with pytest.raises(ValueError, match="expected DDP and as many turns for all"):
        example(rows=(BenchmarkRow("DataParallel", (0.1,)),))
    with pytest.raises(ValueError, match=r"of \[1, 2\] turns"):
        example(rows=(BenchmarkRow("DDP", (0.1,)), BenchmarkRow("DataParallel", (0.1, 0.2))))


def test_compiled_contestants_stand_beside_their_twins_and_say_what_compiling_took() -> None:
    compiled = (
        BenchmarkRow("compute only, compiled", (0.04,) * 3, compile_s=(20.0,)),
        BenchmarkRow("DDP, compiled", (0.12,) * 3, compile_s=(22.0,)),
        BenchmarkRow("DataParallel, compiled", (0.06,) * 3, compile_s=(18.0, 10.0)),
    )
    found = example(rows=(*example().rows, *compiled))
    assert "18.0 + 10.0" in shown(found) and "| compiled s |" in markdown("Benchmark", [found])
    assert "compiled" not in shown(example()).partition("Bound")[0]
