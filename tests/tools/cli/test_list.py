"""anabranch list: what --trace and --network know by name."""

import pytest

from anabranch.tools.cli import arguments
from anabranch.tools.cli.main import main
from anabranch.tools.network_presets import PRESETS
from anabranch.values.files import bundled_traces
from tools.cli.nouns import json_of


def test_everything_listed_can_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    document = json_of(capsys, "list")
    assert document["command"] == "list"
    assert [row["name"] for row in document["traces"]] == list(bundled_traces())
    for row in document["traces"]:
        trace = arguments.trace(row["name"])
        assert row["gradients"] == len(trace) and row["nbytes"] == trace.nbytes == 4 * row["parameters"]
        assert (row["model"], row["batch"], row["device"]) == tuple(
            trace.meta[key] for key in ("model", "batch", "device")
        )
    assert [row["name"] for row in document["networks"]] == list(PRESETS)
    for row in document["networks"]:
        network = arguments.network(f"{row['name']}:ranks=16")
        assert network.world_size == 16 and row["source"] and row["spread"]
        costs = row["model"] if "alpha_s" in row["model"] else row["model"]["across"]
        assert costs["alpha_s"] > 0 and costs["beta_s_per_byte"] > 0


def test_tables_name_everything_and_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in (*bundled_traces(), *PRESETS))
    words = " ".join(out.split())
    assert "10gbe is published: a = 1.3687 ms" in words and "100ib is nominal: 5 µs a hop" in words
