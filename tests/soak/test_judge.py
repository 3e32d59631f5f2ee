"""The judge itself: what is planted must be found, in the same way as a campaign would find it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from soak.campaign import Campaign
from soak.case import Case
from soak.faults import PLANTED
from soak.judge import GOOD, RAW, close, judge, nameless
from soak.launched import verdict_of
from soak.world import RankRecord, Server, obligation

VICTIM = 1
MOMENT = 3


@pytest.mark.campaign
def test_what_is_planted_is_found_and_nothing_else(tmp_path: Path) -> None:
    """Most of the time is spent waiting for those that hang."""
    cases = {name: Case(name, "no-tuning", 2, VICTIM, MOMENT, "close") for name in [*PLANTED, "explain-alone"]}
    with Server() as server, ThreadPoolExecutor(len(cases)) as pool:
        campaign = Campaign(server, tmp_path)
        verdicts = dict(zip(cases, pool.map(campaign.run, cases.values()), strict=True))
    for name, planted in PLANTED.items():
        verdict = verdicts[name]
        assert verdict.outcome == planted.row and verdict.why and not verdict.good, verdict
    assert verdicts["explain-alone"].outcome == "trained on", verdicts["explain-alone"]
    assert f"rank {VICTIM} has not ended" in verdicts["planted-hang"].why and "'fault'" in verdicts["planted-hang"].why


# ------------------------------------------------------------------------------------------ from written-down events

KILLED = Case("kill-forward", "default", 3, VICTIM, MOMENT, "raise")


def survivor(*digests: str, error: str = "CollectiveError", done: bool = False) -> RankRecord:
    """A rank that made steps with these digests, and then raised an error or trained to the end."""
    events = [{"what": "step", "at": float(i), "step": i, "digest": digest} for i, digest in enumerate(digests)]
    last = {"what": "done", "digest": digests[-1], "weights": [1.0]} if done else {"what": "error", "trace": "x.py:1"}
    return RankRecord([*events, {**last, "at": 9.0, "kind": error, "words": "bucket 3 did not get through"}], 1)


VICTIMS = RankRecord([{"what": "fault", "at": 2.5, "step": 3, "stage": "trying optimal."}], -9)


def test_a_clear_error_on_all_survivors() -> None:
    verdict = judge(KILLED, [survivor("a", "b"), VICTIMS, survivor("a", "b")])
    assert (verdict.outcome, verdict.stage) == ("clear error", "trying")


def test_one_survivor_that_says_nothing_is_found() -> None:
    mute = RankRecord([{"what": "step", "at": 1.0, "step": 0, "digest": "a"}], 1, stderr="Traceback …\nbye")
    verdict = judge(KILLED, [survivor("a"), VICTIMS, mute])
    assert verdict.outcome == "unnamed traceback" and "rank 2 ended with 1 and said nothing: bye" in verdict.why


@pytest.mark.parametrize(("found", "outcome"), [(["a", "c", "c"], "silent divergence"), (["a", "c"], "clear error")])
def test_weights_that_differ_are_silent_only_if_training_went_on(found: list[str], outcome: str) -> None:
    others = survivor(*["a", "b", "b"][: len(found)])
    verdict = judge(KILLED, [others, VICTIMS, survivor(*found)])
    assert verdict.outcome == outcome


def test_a_bare_error_has_no_name() -> None:
    verdict = judge(KILLED, [survivor("a"), VICTIMS, survivor("a", error="KeyError")])
    assert verdict.outcome == "unnamed traceback" and "rank 2 raised KeyError" in verdict.why


GLOOS_OWN = (
    "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5",
    "Gloo connectFullMesh failed with [/__w/gloo/transport/tcp/device.cc:1] no error",
    "wait timeout after 3000ms, keys: /default_pg/0//cpu//0/0",
    "Socket Timeout",
    "[../torch/csrc/distributed/c10d/socket.cpp:1] The client socket has timed out",
    "Connection reset by peer",
    "Application timeout caused pair closure",
)
OURS = (
    "bucket 3 did not get through: [/gloo/transport/tcp/pair.cc:534] Connection closed by peer; look for the first",
    "ranks could not agree on a plan (trying optimal): Gloo connectFullMesh failed",
)


@pytest.mark.parametrize("words", GLOOS_OWN)
def test_gloos_own_words_say_too_little_under_a_plan(words: str) -> None:
    def with_words(in_force: str) -> RankRecord:
        error = {"what": "error", "at": 9.0, "kind": "RuntimeError", "words": words, "trace": "x.py:1"}
        return RankRecord([{**error, "in_force": in_force}], 1)

    verdict = judge(KILLED, [with_words("under a plan, running optimal."), VICTIMS, survivor("a")])
    assert verdict.outcome == "unnamed traceback" and "rank 0 raised Gloo's own" in verdict.why
    verdict = judge(KILLED, [with_words(""), VICTIMS, survivor("a")])
    assert verdict.outcome == "clear error" and verdict.raw == ("x.py:1",), "as under DDP"
    error = {"kind": "RuntimeError", "words": words, "in_force": "under a plan"}
    forward, backward = "distributed.py:1775 in _pre_forward", "graph.py:979 in _engine_run_backward"
    assert nameless({**error, "trace": forward, "ddp_sends_in_backward": False}) == "", "DDP's own message"
    assert nameless({**error, "trace": backward, "ddp_sends_in_backward": True}) == "", "DDP's own message"
    gathers = "distributed_c10d.py:4287 in all_gather"
    assert nameless({**error, "trace": gathers, "caller": "checkpoint"}) == "", "a message of torch's checkpoints"
    assert nameless({**error, "trace": gathers, "caller": "anabranch"}).startswith("raised Gloo's own")
    assert nameless({**error, "trace": backward, "ddp_sends_in_backward": False}).startswith("raised Gloo's own")


def test_our_words_are_enough() -> None:
    assert not any(RAW.match(words) for words in OURS)


LAUNCHED = Case("sigint-torchrun", "default", 2, 0, 12, "raise")


def test_what_a_launcher_and_its_ranks_may_leave() -> None:
    ended = [interrupted(-2).events, interrupted(1, "CollectiveError", "bucket 3 did not get through").events]
    assert verdict_of(LAUNCHED, ended, 1, [], "").good
    assert verdict_of(LAUNCHED, ended, 1, [4711], "").outcome == "hang"
    assert verdict_of(LAUNCHED, ended, 1, [], "forcefully exiting via 9").outcome == "hang"
    assert verdict_of(LAUNCHED, ended, 0, [], "").outcome == "crash"
    assert verdict_of(LAUNCHED, ended[1:], 1, [], "").why == "no rank has received the signal"
    assert verdict_of(LAUNCHED, ended, 1, [], "Exception ignored in: <x>").outcome == "unnamed traceback"
    bare = [*ended[:1], interrupted(1, "KeyError", "x").events]
    assert "raised KeyError" in verdict_of(LAUNCHED, bare, 1, [], "").why


def test_a_victim_that_was_to_vanish_is_no_crash_and_a_survivor_is() -> None:
    records = [survivor("a"), VICTIMS, RankRecord(survivor("a").events, -6, stderr="terminate called")]
    assert judge(KILLED, [*records[:2], survivor("a")]).outcome in GOOD
    assert judge(KILLED, records).why == "rank 2 was ended by signal 6: terminate called"


INTERRUPTED = Case("sigint-all", "default", 2, VICTIM, MOMENT, "raise")


def interrupted(code: int, kind: str = "KeyboardInterrupt", words: str = "", stderr: str = "") -> RankRecord:
    """A rank that received Ctrl-C in its step 3, and ended so."""
    fault = {"what": "fault", "at": 3.0, "step": 3, "stage": "trying optimal.", "ends": True}
    error = {"what": "error", "at": 3.5, "kind": kind, "words": words, "trace": "training.py:1"}
    return RankRecord([fault, error], code, stderr=stderr, ended=4.0)


def test_ranks_that_ctrl_c_ended_end_well_and_an_exit_code_must_say_so() -> None:
    verdict = judge(INTERRUPTED, [interrupted(-2), interrupted(-2)])
    assert (verdict.outcome, verdict.end_s) == ("clear error", 1.0)
    after = interrupted(1, "CollectiveError", "bucket 3 did not get through")
    assert judge(INTERRUPTED, [interrupted(-2), after]).good, "the other rank ended first"
    assert judge(INTERRUPTED, [interrupted(0), after]).why.startswith("rank 0 ended with 0 after KeyboardInterrupt")
    ignored = interrupted(-2, stderr="Exception ignored in: <function>\nKeyboardInterrupt")
    assert judge(INTERRUPTED, [interrupted(-2), ignored]).outcome == "unnamed traceback"


def test_who_received_a_signal_may_not_go_on() -> None:
    events = [dict(event) for event in interrupted(-2).events[:1]]
    later = [{"what": "step", "at": float(at), "step": at} for at in range(4, 9)]
    assert obligation(0, [[*events, *later], later]) == 3.0
    assert obligation(1, [[*events, *later], later]) == 8.0


def test_weights_of_one_part_are_compared_with_those_of_the_same_part() -> None:
    def done(digest: str, part: int) -> RankRecord:
        return RankRecord([{"what": "done", "at": 9.0, "digest": digest, "part": part, "weights": [1.0]}], 0)

    case = Case("slow-loss", "replicate", 4, VICTIM, MOMENT, "raise")
    assert judge(case, [done("a", 0), done("b", 1), done("a", 0), done("b", 1)]).outcome == "trained on"
    assert judge(case, [done("a", 0), done("b", 1), done("a", 0), done("c", 1)]).outcome == "silent divergence"


def test_weights_are_equal_up_to_rounding_and_nan_equals_nan() -> None:
    assert close([1.0, float("nan")], [1.0001, float("nan")])
    assert not close([1.0], [1.01]) and not close([1.0], [1.0, 2.0]) and not close([float("nan")], [1.0])
    assert close([1e33, 2.0], [1.0001e33, 1e28]) and not close([1e33, 2.0], [1e33, 1e31]), "beside a huge weight"


def test_a_case_is_its_text() -> None:
    assert Case.parse(str(KILLED)) == KILLED
    assert Case.parse("kill-any/oktopk/2/0/measuring/exit").moment == "measuring"
    with pytest.raises(ValueError, match="fault is 'kil'"):
        Case.parse("kil/oktopk/2/0/3/exit")
