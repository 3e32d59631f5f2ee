"""anabranch run: an unchanged DDP script, its arguments, exit codes and exceptions, and what was gained."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from anabranch import OkTopk
from anabranch.tools.cli.main import main
from anabranch.tools.cli.run import run
from ranks import patience
from tools.cli.nouns import error_of
from torchrun import marked

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
        [sys.executable, *argv], capture_output=True, text=True, timeout=120 * patience(), env=environment, cwd=folder
    )


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "anabranch.run"]


@pytest.mark.campaign_but_first
@pytest.mark.parametrize(
    ("launcher", "steps"), [(["anabranch", "run", "--nproc-per-node", "2"], "250"), (TORCHRUN, "3")], ids=["run", "own"]
)
def test_two_ranks_of_an_unchanged_script(launcher: list[str], steps: str, script: str) -> None:
    done = started("-m", *launcher, "--compress", "int8", script, "--steps", steps, ranks=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"['--steps', '{steps}'] train.py __main__ True", "True"]
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("anabranch run: ")]
    assert said.startswith("anabranch run: Net: ")
    # Which sentence depends on times; tests/tuning/test_explain.py has all their words.
    assert any(words in said for words in (" ms a step", "nothing was chosen before training ended"))


TRAINS_ON = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))))
step = 0
while True:
    model(torch.ones(64, 256)).square().mean().backward()
    step += 1
    if step == 20:
        os.write(1, b"trained\\n")
"""


@pytest.mark.campaign_but_first
@pytest.mark.parametrize("whom", ["all", "launcher"])
def test_ctrl_c_ends_all(whom: str, tmp_path: Path) -> None:
    """A terminal sends it to the launcher and all ranks; a scheduler to the launcher."""
    script, mark = tmp_path / "train.py", f"{tmp_path}/mark"
    script.write_text(TRAINS_ON)
    argv = [sys.executable, "-m", "anabranch", "run", "--nproc-per-node", "2", str(script)]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "MARK": mark}
    ) as command:
        try:
            assert command.stdout is not None
            assert [command.stdout.readline() for _ in range(2)] == [b"trained\n"] * 2
            for pid in marked(f"MARK={mark}") if whom == "all" else [command.pid]:
                os.kill(pid, signal.SIGINT)
            _, said = command.communicate(timeout=120 * patience())
        finally:
            left = marked(f"MARK={mark}")
            for pid in left:
                os.kill(pid, signal.SIGKILL)
    assert command.returncode != 0 and left == []
    assert b"forcefully exiting" not in said, "torchrun kills ranks that have lost the signal for 30 s"


ENDS = """
import json, sys
from anabranch.tools.cli.main import main
for argv in json.loads(sys.argv[1]):
    try:
        code = main(["run", *argv])
    except SystemExit as stop:
        code = f"exit {stop.code}"
    print("ended with", code, flush=True)
    print("ended with", code, file=sys.stderr, flush=True)
"""


def test_the_end_is_the_scripts_own(script: str, tmp_path: Path) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text("print('hello')")
    ends = {end: [script, "--steps", "2", "--end", end] for end in ("return", "0", "3")}
    calls = [*ends.values(), ["-m", "train", "--steps", "1"], [str(plain)]]
    done = started("-c", ENDS, json.dumps(calls), folder=str(tmp_path))
    assert done.returncode == 0, done.stderr
    of_script = [f"{argv[-4:]} train.py __main__ True\nTrue" for argv in ends.values()]
    expected = [*of_script, "['--steps', '1'] train.py __main__ True\nTrue", "hello"]
    codes = ["0", "exit 0", "exit 3", "0", "0"]
    assert done.stdout == "".join(f"{text}\nended with {code}\n" for text, code in zip(expected, codes, strict=True))
    returned, exited, failed, module, without = done.stderr.split("ended with")[:5]
    said = "anabranch run: Net: nothing was tried: there is one rank, so nothing to send."
    assert said in returned and said in exited and said not in failed and said in module
    assert "made no DistributedDataParallel" in without and "mp.spawn" in without
    assert "if it uses anabranch already" in without


@pytest.mark.campaign
def test_an_exception_is_the_scripts_own(script: str) -> None:
    done = started("-m", "anabranch.run", script, "--steps", "2", "--end", "error")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("LookupError: of the script")
    assert 'raise LookupError("of the script")' in done.stderr and "nothing was tried" not in done.stderr


def test_options_reach_the_ranks(script: str) -> None:
    program = run([script, "--lanes", "9"], nproc_per_node=3, compress="oktopk:0.05", planner="single", lanes=2)
    assert isinstance(program, partial)
    options = ["--compress", "oktopk:0.05", "--planner", "single", "--lanes", "2"]
    assert program.args == (3, [*options, script, "--lanes", "9"])
    rank = run([script, "--lanes", "9"], compress="oktopk:0.05", planner="single", lanes=2)
    assert isinstance(rank, partial)
    settings = {"cache": False, "compress": OkTopk(0.05), "planner": "single", "lanes": 2}
    assert rank.args == ([script, "--lanes", "9"], False, settings)


def test_mistakes_are_one_line(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nowhere.py: no such file" in error_of(capsys, "run", "nowhere.py")
    assert "--compress is 'gtopk:0.01': expected bf16, int8" in error_of(
        capsys, "run", "--compress", "gtopk:0.01", script
    )
    assert "no_such.module: no such module" in error_of(capsys, "run", "-m", "no_such.module")
    assert "no such module" in error_of(capsys, "run", "-m", "os.path;import os")
    assert "--planner is 'best': expected one of per_tensor, " in error_of(capsys, "run", "--planner", "best", script)
    monkeypatch.setenv("RANK", "0")
    assert "a launcher has started this rank already" in error_of(capsys, "run", "--nproc-per-node", "2", script)
    assert main(["run", "--help"]) == 0
