"""anabranch demo: on which links it trains, what it prints and keeps, its page, and a rank that dies."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

import anabranch as ab
from anabranch.tools.cli import demo
from anabranch.tools.cli.main import main
from anabranch.tools.demo import train
from anabranch.tools.demo.text import CharTransformer
from anabranch.tools.lab import preflight
from anabranch.tools.lab.cluster import Cluster
from anabranch.tools.lab.rank_environment import LAB_ID
from anabranch.tools.report.documents import DemoDocument
from anabranch.tools.report.runs import parse_file, read_runs
from anabranch.values.errors import LabError
from ranks import on_ranks, patience
from tools.cli.nouns import error_of
from tools.lab.lab_process import until
from tools.report.demos import demo_document
from tools.report.run_files import scaling_document

STEPS = 12  # enough to record a trace and to measure the network
Links = list[Cluster | None]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Links:
    """Runs nothing; the links of what would have run."""
    links: Links = []

    def trained(folder: Path, workers: int, steps: int, cluster: Cluster | None) -> dict[str, Any]:
        links.append(cluster)
        document = demo_document()
        (folder / "auto.jsonl").write_text('{"step": 1, "loss": 5.0}\n')
        return {name: document[name] for name in ("parameters", "benchmark", "trainings")}

    monkeypatch.setattr(demo, "_trained", trained)
    monkeypatch.setattr(demo, "_scaling", scaling_document)
    monkeypatch.setattr(preflight, "check", lambda cluster, gpus: None)
    return links


def test_real_links_where_this_machine_allows_them(
    capsys: pytest.CaptureFixture[str], made_up: Links, tmp_path: Path
) -> None:
    assert main(["demo", "--keep", str(tmp_path / "run")]) == 0
    (cluster,) = made_up
    assert cluster is not None and list(cluster.rates_bit_s) == [1e8] * 2 and not cluster.emulated
    out, err = capsys.readouterr()
    assert "2 hosts, 100 Mbit/s links, network namespaces" in err and "emulated" not in err
    assert "A step with int8 is 2.50× as fast as DDP's here" in out and "437,888 parameters" in out
    page = tmp_path / "run" / "report.html"
    assert f"The page of it all: {page.as_uri()}" in err and "<h1>anabranch demo</h1>" in page.read_text()


def test_without_rights_links_are_emulated_and_it_is_said(
    capsys: pytest.CaptureFixture[str], made_up: Links, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(cluster: Cluster, gpus: list[str]) -> None:
        if not cluster.emulated:
            raise LabError(f"this machine cannot run the lab: no permission, {preflight.EMULATE}")

    monkeypatch.setattr(preflight, "check", refuse)
    assert main(["demo", "--keep", str(tmp_path / "run")]) == 0
    assert [cluster is not None and cluster.emulated for cluster in made_up] == [True]
    err = capsys.readouterr().err
    assert (
        "Not on 2 hosts, 100 Mbit/s links, network namespaces: this machine cannot run the lab: no permission.\n" in err
    )
    document = parse_file((tmp_path / "run" / "demo.json").read_bytes(), "demo.json")
    assert isinstance(document, DemoDocument) and "delays inside the ranks: not a real network" in document.link
    assert document.link in (tmp_path / "run" / "report.html").read_text()


def test_where_nothing_can_be_slowed_down(
    capsys: pytest.CaptureFixture[str], made_up: Links, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(cluster: Cluster, gpus: list[str]) -> None:
        raise LabError("this machine cannot run the lab: it needs Linux")

    monkeypatch.setattr(preflight, "check", refuse)
    assert main(["demo", "--keep", str(tmp_path)]) == 0
    assert made_up == [None]
    err = capsys.readouterr().err
    assert err.count("it needs Linux") == 2 and "this machine as it is, without slow links" in err


def test_no_slow_links(capsys: pytest.CaptureFixture[str], made_up: Links, tmp_path: Path) -> None:
    assert main(["demo", "--rate", "unshaped", "--keep", str(tmp_path)]) == 0
    assert made_up == [None]
    assert "this machine as it is, without slow links" in capsys.readouterr().err
    page = (tmp_path / "report.html").read_text()
    assert "Compressed: loss over time" in page


@pytest.mark.slow
def test_at_your_size() -> None:
    found = demo._scaling()
    assert [strategy["name"] for strategy in found["strategies"]] == [
        "by_bytes",
        "optimal",
        "auto",
        "int8",
        "oktopk:0.01",
    ]
    assert found["model"] == "densenet201" and len(found["networks"]) == 2 and found["answer"]


def code_runs(rank: int) -> list[str]:
    """Whether the code that the page shows makes what the demo trains; the names of those where it does not."""
    different = []
    for setup in train.SETUPS:
        names = {"ab": ab, "model": CharTransformer(layers=1), "DistributedDataParallel": DistributedDataParallel}
        shown, ours = eval(setup.code, names), setup.wrap(CharTransformer(layers=1))  # noqa: S307 (our own code)
        kinds = [
            one._collectives and one._collectives.kinds for one in (shown, ours) if isinstance(one, ab.DataParallel)
        ]
        if type(shown) is not type(ours) or len(set(kinds)) > 1:
            different.append(setup.name)
    return different


@pytest.mark.slow
def test_the_code_of_each_setup_is_what_is_trained() -> None:
    assert on_ranks(code_runs, 2) == [[], []]


def test_json(capsys: pytest.CaptureFixture[str], made_up: Links, tmp_path: Path) -> None:
    assert main(["demo", "--keep", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["command"] == "demo" and len(document["trainings"]) == 6
    assert document == json.loads((tmp_path / "demo.json").read_text())


def test_nothing_of_a_former_run_stays(capsys: pytest.CaptureFixture[str], made_up: Links, tmp_path: Path) -> None:
    (tmp_path / "auto_plan.json").write_text("old")
    assert "--force" in error_of(capsys, "demo", "--keep", str(tmp_path)) and not made_up
    assert main(["demo", "--keep", str(tmp_path), "--force"]) == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["auto.jsonl", "demo.json", "report.html", "scale.json"]


def test_without_plotly_all_but_the_page_is_there(
    capsys: pytest.CaptureFixture[str], made_up: Links, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("anabranch.values.dependencies.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "plotly", raising=False)
    assert main(["demo", "--keep", str(tmp_path)]) == 0
    assert "the page needs plotly" in capsys.readouterr().err and not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--steps", "20"], "--steps"),
        (["--workers", "1"], "--workers"),
        (["--rate", "fast"], "--rate is 'fast': expected a rate in kbit, mbit or gbit"),
        (["--rate", "unshaped", "--emulate"], "expected a rate, such as 100mbit"),
        (["--rate", "100gbit"], "expected 1 Mbit/s to 34 Gbit/s"),
    ],
)
def test_a_wrong_option(capsys: pytest.CaptureFixture[str], options: list[str], expected: str, tmp_path: Path) -> None:
    assert expected in error_of(capsys, "demo", "--keep", str(tmp_path), *options)
    assert not list(tmp_path.iterdir())


def test_workers_that_fail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert main(["demo", "--rate", "unshaped", "--keep", str(tmp_path / "run")]) == 2
    assert "the demo's workers ended with exit code 1" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_ctrl_c(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("anabranch.tools.lab.launch.run", lambda cluster, command, timeout_s: 128 + signal.SIGINT)
    assert main(["demo", "--emulate", "--keep", str(tmp_path / "run")]) == 130
    assert "error" not in capsys.readouterr().err and not (tmp_path / "run").exists()


def ranks_of(process: "subprocess.Popen[str]") -> list[int]:
    """The ids of a running demo's ranks, in no order."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                children = [int(line.split()[1]) for line in (folder / "status").read_text().splitlines()
                            if line.startswith("PPid:")]  # fmt: skip
            except OSError:
                continue
            if b"anabranch.tools.demo.train" in words and children == [process.pid]:
                found.append(int(folder.name))
    return found


@pytest.mark.campaign
def test_a_rank_that_is_killed_ends_the_demo(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != LAB_ID}
    command = [sys.executable, "-m", "anabranch", "demo", "--emulate", "--keep", str(tmp_path / "run")]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            until(lambda: len(ranks_of(process)) == 2)
            os.kill(ranks_of(process)[1], signal.SIGKILL)
            out, err = process.communicate(timeout=60 * patience())
        finally:
            process.kill()
    assert process.returncode == 2 and out == "" and "killed by SIGKILL" in err
    assert "the demo's workers ended with exit code 137" in err and not (tmp_path / "run").exists()


def check(found: dict[str, Any], folder: Path, steps: int) -> None:
    """What six short trainings must have in common, whatever the clock says."""
    trainings = {one["name"]: one for one in found["trainings"]}
    assert trainings["DDP"]["losses"] == trainings["DataParallel"]["losses"]  # of two summands the order is the same
    assert len(trainings["DDP"]["losses"]) == steps and len(trainings["auto"]["losses"]) == 2 * steps
    memory = trainings["DDP"]["memory"]
    assert memory["parameters"] == memory["gradients"] == 4 * found["parameters"] and memory["residuals"] == 0
    assert memory["optimizer"] >= 2 * memory["parameters"]  # AdamW's two moments, and its steps
    rows = {row["name"]: row for row in found["benchmark"]["rows"]}
    assert list(rows) == ["compute only", *trainings] and rows["DDP"]["predicted_s"] is not None
    left = read_runs([folder])
    assert len(left.traces) == len(left.windows) == 1 and len(left.windows[0][1]) == 2  # both ranks
    losses = [run for run in left.trainings if run.lines[0].loss is not None]
    assert [line.loss for line in losses[0].lines] == trainings["auto"]["losses"]


@pytest.mark.campaign
def test_on_emulated_links(tmp_path: Path) -> None:
    found = demo._trained(tmp_path, 2, STEPS, Cluster([1e9] * 2, alpha_s=1e-5))
    assert "emulated" in found["benchmark"]["facts"]["network"]
    check(found, tmp_path, STEPS)
