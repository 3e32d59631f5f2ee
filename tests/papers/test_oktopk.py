"""Ok-Topk's tables: words counted, the cost table, and speed-ups on 256 workers."""

import pytest
import torch
from benchmarks.papers import oktopk
from benchmarks.papers.oktopk_counts import DENSITY
from benchmarks.papers.table import AGREES, Section

from anabranch.planning.prices import sparse_phases
from anabranch.values.links import AlphaBeta


@pytest.fixture(scope="module")
def volumes() -> Section:
    return oktopk.volumes()


@pytest.fixture(scope="module")
def throughput() -> Section:
    return oktopk.throughput()


def test_counted_words_keep_to_the_cost_table(volumes: Section) -> None:
    """Tolerance 1 % where the table is exact (counts and heads of messages travel too), 10 % for Gaussiank."""
    rows = {(row.case, row.what): row for row in volumes.figures}
    assert len(rows) == 8
    for (_, what), row in rows.items():
        assert row.published is not None and row.ours is not None and row.ratio is not None
        if what in ("Dense", "TopkA", "gTopk"):
            assert row.ratio == pytest.approx(1, rel=0.01)
        elif what == "Gaussiank":
            assert row.word == AGREES
        else:
            assert row.ours <= row.published and row.word == "under the bound"


def test_counting_is_the_same_every_time_and_leaves_threads_alone(volumes: Section) -> None:
    threads = torch.get_num_threads()
    assert oktopk.volumes() == volumes
    assert torch.get_num_threads() == threads


def test_the_cost_table_on_four_ranks_by_hand() -> None:
    """α = 1, a byte takes ¼: latencies and words, n = 100, k = 8."""
    links = AlphaBeta("ring", 1.0, 0.25)
    costs = {name: cost.seconds(links) for name, cost in oktopk.published_costs(100, 8, 4).items()}
    assert costs == {
        "Ok-Topk": 36 + 12, "Dense": 150 + 4, "TopkA": 48 + 2, "TopkDSA": 87 + 8, "gTopk": 64 + 4, "Gaussiank": 48 + 4,
    }  # fmt: skip


def test_the_ends_are_those_of_the_schemes(throughput: Section) -> None:
    for gbit in oktopk.GBITS:
        rows = {row.what: row.ours for row in throughput.figures if row.case == f"{gbit} Gbit/s"}
        over = [value for what, value in rows.items() if what.startswith("over ") and value]
        (least,) = [value for what, value in rows.items() if what.startswith("least")]
        (most,) = [value for what, value in rows.items() if what.startswith("most")]
        assert (least, most) == (min(over), max(over))


def test_the_published_range_and_ours_overlap(throughput: Section) -> None:
    """Only the order of magnitude compares: ranges meet on all three, and faster links gain less."""
    most = {row.case: row.ours for row in throughput.figures if row.what.startswith("most")}
    assert list(most) == ["10 Gbit/s", "25 Gbit/s", "100 Gbit/s"]
    values = [value for value in most.values() if value]
    assert values == sorted(values, reverse=True) and values[1] > oktopk.MOST > values[2] > oktopk.LEAST


def test_where_latencies_weigh_more_than_words(throughput: Section) -> None:
    """As the notes say: of Ok-Topk's messages at 256 workers, from 25 Gbit/s on and not at 10."""
    numel = oktopk.BERT.numel or 0
    exchange = sparse_phases(numel, oktopk.WORKERS, DENSITY).values()
    for gbit in oktopk.GBITS:
        words_s = sum(phase.sent_nbytes for phase in exchange) * 8e-9 / gbit
        latencies_s = sum(phase.messages for phase in exchange) * oktopk.ALPHA_S
        assert (latencies_s > words_s) == (gbit >= 25)
    assert any(note.startswith("from 25 Gbit/s on") for note in throughput.notes)


def test_what_was_measured_says_where() -> None:
    section = oktopk.measured()
    assert "benchmarks/sparse_h200_lab_10gbit_2026-11-15.md" in section.how and "NVIDIA H200" in section.how
    assert section.figures[0].ours == 7.52
