"""explain(): what was found in each stage of tuning, and a line per bucket with the time that its exchange saves."""

from dataclasses import replace

import anabranch as ab
from anabranch.exchange.nodes import FoundNodes
from anabranch.tuning.explain import Findings, explanation, in_short
from anabranch.tuning.trial import StepTimes, Trial, computed_faster
from anabranch.values.network import InsideNodes
from anabranch.values.nodes import Nodes

TENSORS = (ab.TensorSpec("bias", 1000, 4, 0.1), ab.TensorSpec("weight", 1_000_000, 4, 0.2))
TRACE = ab.Trace(TENSORS, 0.1)
NETWORK = ab.Network(2, {"dense": ab.Curve.linear(1e-3, 1e-8), "oktopk:0.01": ab.Curve.linear(2e-3, 1e-9)})
PLAN = ab.Plan((ab.Bucket(("bias",)), ab.Bucket(("weight",), collective="oktopk:0.01")))
NOTHING = Findings("settling", None, None, (), None, None, None, ())


def test_each_bucket_has_its_exchange_and_the_time_that_it_saves() -> None:
    found = replace(NOTHING, trace=TRACE, network=NETWORK, plan=PLAN, exchange_lines=["a line about residuals"])
    title, head, dense, sparse, saved, residuals = explanation(found).splitlines()[-6:]
    assert PLAN.fingerprint[:12] in title and head.split()[-5:] == ["dense,", "ms", "error", "last", "gradient"]
    assert dense.split() == ["0", "0", "dense", "0.004", "1", "100.00", "1.04", "1.04", "-", "bias"]
    assert sparse.split() == ["1", "0", "oktopk:0.01", "3.815", "1", "200.00", "6.00", "41.00", "-", "weight"]
    assert saved.startswith("1 of 2 buckets are compressed, which saves 35.00 ms of the 41.00 ms")
    assert residuals == "a line about residuals"


def test_without_a_network_buckets_have_no_times() -> None:
    *_, line = explanation(replace(NOTHING, trace=TRACE, plan=PLAN)).splitlines()
    assert line.split()[-4:] == ["-", "-", "-", "weight"]


def test_measured_errors_stand_beside_their_buckets() -> None:
    found = replace(NOTHING, trace=TRACE, network=NETWORK, plan=PLAN, errors={PLAN.buckets[1]: 0.4321})
    *_, dense, sparse, _saved, note = explanation(found).splitlines()
    assert dense.split()[-2:] == ["-", "bias"] and sparse.split()[-2:] == ["43.21%", "weight"]
    assert note.startswith("error: of a step's averages, relative to the exact ones")


def test_before_anything_is_found_only_the_stage_is_shown() -> None:
    assert explanation(NOTHING) == "anabranch: settling."


def test_nodes_are_shown_once_they_are_known() -> None:
    for nodes in (FoundNodes(Nodes.of_size(4, 2), "nodes=2"), FoundNodes(None, "nodes=False")):
        assert explanation(replace(NOTHING, nodes=nodes)).splitlines() == ["anabranch: settling.", str(nodes)]


def test_buckets_that_sum_inside_nodes_are_counted_with_what_they_cost() -> None:
    plan = ab.Plan(tuple(replace(bucket, collective="dense@nodes") for bucket in PLAN.buckets))
    line = ab.Curve.linear(1e-3, 0.0)
    network = replace(NETWORK, curves={**NETWORK.curves, "dense@nodes": line}, inside=InsideNodes(2, line, line))
    text = explanation(replace(NOTHING, trace=TRACE, network=network, plan=plan))
    assert "Summed inside nodes first, they take 2.00 ms there, and 1.00 ms between nodes." in text
    takes_ms, dense_ms = 2 * 3.0, 1.04 + 41.0
    saves = f"2 of 2 buckets sum inside nodes, which saves {dense_ms - takes_ms:.2f} ms of the {dense_ms:.2f} ms"
    assert saves in text, "all three stages are counted"
    assert "with dense messages on one lane" in text
    unknown = replace(network, curves=NETWORK.curves)  # as of a network.json that was measured for other kinds
    for flat in (NETWORK, unknown):
        assert "nodes" not in explanation(replace(NOTHING, trace=TRACE, network=flat, plan=PLAN))


def test_an_emulated_network_is_named_before_and_after_it_is_measured() -> None:
    emulated = replace(NOTHING, network_note="emulated: 1 Gbit/s")
    assert explanation(emulated).splitlines()[1] == "Network (emulated: 1 Gbit/s): not measured."
    assert "Network (emulated: 1 Gbit/s): 2 ranks" in explanation(replace(emulated, network=NETWORK))


def test_computing_that_is_faster_than_recorded_is_said() -> None:
    computing_s = TRACE.forward_s + TRACE.backward_s
    faster = computed_faster(TRACE, PLAN, 0.9 * computing_s, computing_s)
    assert "That is 90% of what was recorded: " in explanation(replace(NOTHING, trace=faster))
    assert "recorded" not in explanation(replace(NOTHING, trace=TRACE))


def test_texts_of_a_network_from_a_file_control_no_terminal() -> None:
    network = replace(NETWORK, meta={"refined": "\x1b]0;title\x07"})
    assert r"Corrected by live steps: \x1b]0;title\x07." in explanation(replace(NOTHING, network=network))


def test_the_reason_for_exposed_time_is_the_slower_of_wire_and_backward() -> None:
    slow = explanation(replace(NOTHING, trace=TRACE, network=ab.Network.linear(2, 1e-3, 1e-6)))
    fast = explanation(replace(NOTHING, trace=TRACE, network=ab.Network.linear(2, 1e-3, 1e-9)))
    assert "since communication takes longer than backward." in slow
    assert "since the last gradient, weight, must still be sent when backward ends." in fast


def test_a_given_network_without_a_cost_for_a_given_plan_leaves_the_prediction_out() -> None:
    given = ab.Plan((ab.Bucket(("bias", "weight"), collective="bf16"),))
    step = ab.Timeline((ab.Span("compute", "backward", 0.0, 0.2),))
    trial = Trial("the plan it was given", given, (StepTimes(0.3, 0.1, 0.2),), (step,))
    text = explanation(replace(NOTHING, trace=TRACE, network=NETWORK, trials=[trial], plan=given))
    (line,) = [line for line in text.splitlines() if line.startswith(" the plan it was given")]
    assert line.split()[-7:] == ["-", "300.00", "ms", "-", "100.00", "ms", "1.00×"]


OWN = Trial("DDP's own buckets", None, (StepTimes(0.4, 0.1, 0.3),))
OTHER = Trial("optimal", PLAN, (StepTimes(0.32, 0.02, 0.2),))


def test_in_short_a_gain_is_measured_and_predicted() -> None:
    found = replace(NOTHING, trace=TRACE, network=NETWORK, trials=[OWN, OTHER], kept=OTHER, plan=PLAN)
    assert in_short(found) == (
        "1.25× as fast. DDP's own buckets 400.00 ms a step, optimal 320.00 ms (predicted 306.00 ms); from the start of "
        "forward to averaged gradients."
    )
    assert "predicted" not in in_short(replace(found, network=None))


def test_in_short_no_gain_has_its_reason() -> None:
    found = replace(NOTHING, stage="no plan was clearly faster", trials=[OWN], kept=OWN)
    alone = "nothing was gained (no plan was clearly faster); DDP's own buckets 400.00 ms a step."
    assert in_short(found) == alone
    assert in_short(replace(found, trials=[OWN, OTHER])) == f"{alone} Tried: optimal 320.00 ms."


def test_in_short_after_a_search_that_began_with_a_plan() -> None:
    found = Findings("running optimal", None, None, [OTHER], OTHER, OTHER.plan, None, ())
    assert in_short(found) == ("running optimal, 320.00 ms a step; the last search compared it with other plans only.")


def test_in_short_before_a_choice_there_is_the_stage() -> None:
    assert in_short(NOTHING).startswith("nothing was chosen before training ended (settling)")
