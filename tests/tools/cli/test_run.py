"""anabranch run: an unchanged DDP script, its arguments, exit codes and exceptions, and what was gained."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch import OkTopk
from anabranch.tools.cli.main import main
from anabranch.tools.cli.run import Program, run
from tools.cli.nouns import error_of

SCRIPT = '''
import argparse, os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import DistributedDataParallel as TheSame

class Net(torch.nn.Sequential):
    """Its name is in the report."""

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--end", default="return")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Net(*(torch.nn.Linear(64, 64) for _ in range(4))), gradient_as_bucket_view=True)
    assert isinstance(model, DistributedDataParallel) and isinstance(model, TheSame)
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(given.steps):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(sys.argv[1:], os.path.basename(sys.argv[0]), __name__, sys.path[0] == os.path.dirname(__file__))
        print(hasattr(model, "explain"))
    dist.destroy_process_group()
    if given.end == "error":
        raise LookupError("of the script")
    if given.end != "return":
        sys.exit(int(given.end))

if __name__ == "__main__":
    main()
'''


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def started(*argv: str, ranks: bool = False, folder: str | None = None) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own; without ``ranks`` as the only rank of a launcher."""
    of_launcher = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {**os.environ, **({} if ranks else of_launcher)}
    return subprocess.run(
        [sys.executable, "-m", *argv], capture_output=True, text=True, timeout=120, env=environment, cwd=folder
    )


@pytest.mark.campaign_but_first
@pytest.mark.parametrize("launcher", [["anabranch", "run", "--nproc-per-node", "2"], ["torch.distributed.run"]])
def test_two_ranks_of_an_unchanged_script(launcher: list[str], script: str) -> None:
    torchrun = ["--standalone", "--nproc-per-node", "2", "-m", "anabranch.run"]
    words = [*launcher, *(torchrun if launcher == ["torch.distributed.run"] else [])]
    done = started(*words, "--compress", "int8", script, "--steps", "250", ranks=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['--steps', '250'] train.py __main__ True", "True"]
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("anabranch run: ")]
    assert said.startswith("anabranch run: Net: ") and " ms a step" in said
    assert "nothing was gained (running DDP's own buckets: " in said or "× as fast" in said


@pytest.mark.campaign_but_first
@pytest.mark.parametrize(("end", "code"), [("return", 0), ("0", 0), ("3", 3), ("error", 1)])
def test_the_end_is_the_scripts_own(end: str, code: int, script: str) -> None:
    done = started("anabranch.run", script, "--steps", "2", "--end", end)
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith(f"['--steps', '2', '--end', '{end}'] train.py __main__ True")
    said = "anabranch run: Net: nothing was tried: there is one rank, so nothing to send."
    assert (said in done.stderr) == (code == 0)
    if end == "error":
        assert done.stderr.splitlines()[-1].endswith("LookupError: of the script")
        assert 'raise LookupError("of the script")' in done.stderr


@pytest.mark.campaign
def test_a_module(script: str) -> None:
    done = started("anabranch", "run", "-m", "train", "--steps", "1", folder=str(Path(script).parent))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['--steps', '1'] train.py __main__ True")


@pytest.mark.campaign
def test_a_script_without_ddp(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text("print('hello')")
    done = started("anabranch", "run", str(path), ranks=True)
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert "made no DistributedDataParallel" in done.stderr and "mp.spawn" in done.stderr
    assert "if it uses anabranch already" in done.stderr


def test_options_reach_the_ranks(script: str) -> None:
    program = run([script, "--lanes", "9"], nproc_per_node=3, compress="oktopk:0.05", planner="single", lanes=2)
    assert isinstance(program, Program) and program.ranks == 3
    assert program.options == {"cache": False, "compress": OkTopk(0.05), "planner": "single", "lanes": 2}
    options = ["--compress", "oktopk:0.05", "--planner", "single", "--lanes", "2"]
    assert program.arguments == [*options, script, "--lanes", "9"]


def test_mistakes_are_one_line(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nowhere.py: no such file" in error_of(capsys, "run", "nowhere.py")
    assert "--compress is 'gtopk:0.01': expected bf16, int8" in error_of(
        capsys, "run", "--compress", "gtopk:0.01", script
    )
    assert "no_such.module: no such module" in error_of(capsys, "run", "-m", "no_such.module")
    assert "--planner is 'best': expected one of per_tensor, " in error_of(capsys, "run", "--planner", "best", script)
    monkeypatch.setenv("RANK", "0")
    assert "a launcher has started this rank already" in error_of(capsys, "run", "--nproc-per-node", "2", script)
    assert main(["run", "--help"]) == 0
