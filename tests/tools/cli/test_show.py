"""anabranch show: each of the four files, and text that stays text."""

import json
from pathlib import Path
from typing import Any

import pytest

from anabranch import Bucket, Network, Plan, Span, Timeline, Trace, plan, save, simulate
from anabranch.fsdp.planning import Block, ShardedTrace, ShardingPlan, Unit
from anabranch.tools.cli.main import main
from anabranch.values.files import Noun, dumps
from tools.cli.nouns import HOSTILE, RING, json_of, measured, small_trace

NETWORK = Network.ring(16, 50e-6, 8e-10)
PLAN = plan(small_trace(), NETWORK, "asc")
NOUNS: dict[str, tuple[Noun, list[str]]] = {
    "trace": (small_trace(), ["20 tensors", "forward", "20.00 ms", "60.0% of the tensors", "layer.2"]),
    "network": (measured(), ["ranks", "8", "2 at once 2×", "1.0 KiB", "spread, ms", "Gbit/s"]),
    "plan": (PLAN, [PLAN.fingerprint, "2 lanes", "layer.0", "dense"]),
    "timeline": (simulate(small_trace(), PLAN, NETWORK), ["exposed", "iteration", "lane 1", "bucket 1"]),
}


@pytest.mark.parametrize(("noun", "words"), NOUNS.values(), ids=NOUNS.keys())
def test_each_file_is_readable(
    noun: Noun, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "noun.json"
    save(noun, path)
    assert main(["show", str(path)]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in words)
    document = json_of(capsys, "show", str(path))
    assert document["content"] == json.loads(dumps(noun))


def test_summaries_are_the_nouns_own_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summaries = {}
    for name, (noun, _) in NOUNS.items():
        save(noun, tmp_path / name)
        summaries[name] = json_of(capsys, "show", str(tmp_path / name))["summary"]
    trace, timeline = small_trace(), simulate(small_trace(), PLAN, NETWORK)
    assert (summaries["trace"]["nbytes"], summaries["trace"]["small_tensors"]) == (trace.nbytes, 12)
    assert summaries["plan"] == {"fingerprint": PLAN.fingerprint, "buckets": len(PLAN), "lanes": 2, "tensors": 20}
    assert summaries["timeline"]["exposed_s"] == timeline.exposed_s
    point = summaries["network"]["collectives"]["dense"][-1]
    assert point["bits_per_s"] == 8 * point["nbytes"] / measured().allreduce_s(point["nbytes"])


def test_a_description_of_a_network_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert json_of(capsys, "show", RING)["summary"]["world_size"] == 16


@pytest.mark.parametrize(
    "noun",
    [
        Trace(small_trace(HOSTILE).tensors, 0.0, {HOSTILE: HOSTILE}),
        Network(2, {"dense": measured().curves["dense"], HOSTILE: measured().curves["dense"]}, meta={"m": HOSTILE}),
        Plan((Bucket((HOSTILE, HOSTILE * 100), collective=HOSTILE),)),
        Timeline((Span("compute", HOSTILE, 0.0, 1.0), Span(HOSTILE, HOSTILE, 0.0, 1.0)), {HOSTILE: HOSTILE}),
    ],
)
def test_hostile_text_is_spelled_out(noun: Noun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(noun, tmp_path / "noun.json")
    assert main(["show", str(tmp_path / "noun.json")]) == 0
    out = capsys.readouterr().out
    assert "[red]\\x1b[2" in out
    assert not set("\x1b\x07\u202e") & set(out)


TRACE = ShardedTrace((Block("layers.0", 3 << 20, 1 << 20, 1e-3, 2e-3), Block(HOSTILE, 0, 0, 0.0, 0.0)), 5 << 10)
UNITS = ShardingPlan((Unit(("layers.0", HOSTILE), False), Unit(("layers.2",))), prefetch=2)


@pytest.mark.parametrize(
    ("noun", "words", "summary"),
    [
        (TRACE, ["2 blocks, 3.0 MiB with 5.0 KiB in none", "3.000 ms"],
         {"blocks": 2, "nbytes": TRACE.nbytes, "compute_s": 3e-3}),
        (UNITS, ["2 units, 1 freed after forward, 2 gathered ahead"],
         {"units": 2, "blocks": 3, "freed": 1, "prefetch": 2}),
    ],
)  # fmt: skip
def test_files_of_sharded_models_are_readable(
    noun: ShardedTrace | ShardingPlan,
    words: list[str],
    summary: dict[str, float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "noun.json"
    save(noun, path)
    assert main(["show", str(path)]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in words)
    document = json_of(capsys, "show", str(path))
    assert document["summary"] == summary and document["content"] == json.loads(dumps(noun))
    path.write_text(
        json.dumps(document["content"], sort_keys=True, separators=(",", ":"))
    )  # as other programs write it
    assert json_of(capsys, "show", str(path)) == document


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"units": [{"names": "abc"}]}, "units.0.names: Input should be a valid array, found 'abc'"),
        ({"units": [{"names": ["<b>", ""]}]}, "a unit has an empty name"),
        ({"units": [], "prefetch": 1}, "a sharding plan has no units"),
        ({"prefetch": 1}, "units: Field required"),
        ({"units": [{"names": ["a"]}], "prefetch": True}, "prefetch: Input should be a valid integer, found True"),
    ],
)
def test_a_broken_sharding_plan_is_refused_by_field(
    content: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"format": "sharding_plan", "version": 1, **content}))
    assert main(["show", str(path)]) == 2
    assert words in capsys.readouterr().err
