"""What is said of a demo: the headline, the limit, the price in loss, and where nothing is gained."""

from dataclasses import replace
from typing import Any

import pytest

from anabranch.tools.report import demo as figures
from anabranch.tools.report.documents import BenchmarkRow, DemoDocument, DemoTraining
from anabranch.tools.report.page import templates
from tools.report.demos import SLOW_S, STEPS, benchmark, demo


def said(what: str, value: Any) -> str:
    words: str = getattr(templates().get_template("sentences.txt").module, what)(value)
    return words


def test_the_headline_prefers_the_fastest_that_costs_no_loss() -> None:
    found = said("headline", demo())
    assert (
        found
        == "A step with int8 is 2.50× as fast as DDP's here; after 40 steps its loss is 3.275, DDP's 3.275 (+0.0 %)."
    )


def test_without_such_a_way_the_headline_states_the_price() -> None:
    slow = {name: 0.2 if name in ("int8", "auto", "Ok-Topk 10 %") else step_s for name, step_s in SLOW_S.items()}
    found = said("headline", demo(slow))
    assert found.startswith("A step with Ok-Topk 1 % is 4.00× as fast as DDP's here") and "(+9.2 %)" in found


def test_where_nothing_is_gained_it_is_said() -> None:
    alike = dict.fromkeys(SLOW_S, 0.2)
    assert said("headline", demo({**alike, "compute only": 0.19})).startswith("Nothing is gained here")
    assert "the network is not the limit" in said("network_limit", demo({**alike, "compute only": 0.19}))
    assert "90.0% of the step, is exposed communication: your network is the limit." in said("network_limit", demo())


@pytest.mark.parametrize(
    ("turns_s", "buckets", "faster"),
    [
        ((0.1, 0.1, 0.1, 0.1), 3, True),
        ((*[0.1] * 7, 0.3), 3, True),
        ((0.1, 0.1, 0.1, 0.3), 3, False),  # one lost of four may be chance
        ((0.198, 0.198, 0.198, 0.198), 3, False),  # by too little
        ((0.1, 0.1, 0.1, 0.1), None, False),  # DDP's own buckets cannot be faster than themselves
    ],
)
def test_faster_means_more_than_noise(turns_s: tuple[float, ...], buckets: int | None, faster: bool) -> None:
    row = BenchmarkRow("DataParallel", turns_s, buckets=buckets)
    found = replace(benchmark(SLOW_S, ""), rows=(BenchmarkRow("DDP", (0.2,) * len(turns_s)), row))
    assert found.is_faster(row) == faster


def test_when_the_loss_of_ddp_was_reached() -> None:
    at_s = {one.name: at_s for one, at_s in figures.reached(demo())}
    assert at_s["DDP"] == pytest.approx(8.0) and at_s["int8"] is not None
    found = said("reached_loss", demo())
    assert found.index("Ok-Topk 1 %") < found.index("int8") < found.index("DDP after 8.0 s")


def test_a_loss_is_smoothed_over_its_last_steps() -> None:
    losses = [float(step) for step in range(30)]
    found = figures.smoothed(losses)
    assert found[0] == 0.0 and found[1] == 0.5 and found[29] == pytest.approx(24.5)


def test_a_demo_has_the_steps_of_every_training() -> None:
    found = demo()
    with pytest.raises(ValueError, match="expected DDP among the trainings"):
        demo(trainings=found.trainings[1:])
    with pytest.raises(ValueError, match="2 losses at 1 times"):
        DemoTraining(name="x", code="", losses=(1.0, 2.0), elapsed_s=(1.0,), memory={})


def test_losses_are_compared_after_as_many_steps_as_all_have() -> None:
    found: DemoDocument = demo()
    assert figures.compared_steps(found) == STEPS and len(found.training("int8").losses) == 2 * STEPS
    assert figures.gain(found, found.training("int8")).price == 0.0
