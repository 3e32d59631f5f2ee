"""No text of any file reaches the terminal or a page as control characters, whatever command reads it."""

import json
from pathlib import Path

import pytest

from anabranch import Network, Span, Timeline, Trace, planners, save
from anabranch.planning.simulator import simulate
from anabranch.tools.cli.main import main
from anabranch.values.files import Noun
from tools.cli.nouns import HOSTILE, measured, small_trace

CONTROLS = set("\x1b\x07\x9b\u202e")
KEYS = ("model", "device", "precision", "batch", "date", "order_changed_at", "refined", "backend", "host", HOSTILE)
META = dict.fromkeys(KEYS, HOSTILE)
INPUTS = ["--trace", "trace.json", "--network", "network.json"]
COMMANDS = (
    ["compare", *INPUTS],
    ["plan", *INPUTS, "-o", "made.json"],
    ["simulate", *INPUTS, "--plan", "plan.json"],
    ["scale", "--trace", "trace.json", "--network", "10gbe"],
)


def test_whatever_reads_a_hostile_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trace, network = Trace(small_trace(HOSTILE).tensors, 0.02, META), Network(8, measured().curves, meta=META)
    plan = planners.optimal(trace, network)
    spans = Timeline((Span("compute", HOSTILE, 0.0, 1.0), Span(HOSTILE, HOSTILE, 0.0, 1.0)), META)
    nouns: dict[str, Noun] = {
        "trace": trace,
        "network": network,
        "plan": plan,
        "spans": spans,
        "steps": simulate(trace, plan, network),
    }
    for name, noun in nouns.items():
        save(noun, f"{name}.json")
    Path("bad.json").write_text(json.dumps({"format": HOSTILE, "version": HOSTILE}))
    files = [f"{name}.json" for name in nouns]
    for number, argv in enumerate(COMMANDS):
        assert main([*argv, "--json"]) == 0
        Path(f"printed-{number}.json").write_text(capsys.readouterr().out)
        files.append(f"printed-{number}.json")
    Path("made.json").unlink()
    for argv in (
        *COMMANDS,
        *(["show", file] for file in files[: len(nouns)]),
        ["report", *files],
        ["show", "bad.json"],
    ):
        assert main(argv) == (2 if "bad.json" in argv else 0), argv
        out, err = capsys.readouterr()
        assert not CONTROLS & set(out + err), argv
    page = Path("report.html").read_text()
    assert "owned" in page and not CONTROLS & set(page)
