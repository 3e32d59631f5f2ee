"""The package as users get it: a built wheel, installed without extras, plans, simulates and trains on two ranks.

The environment is empty but for the wheel and the distributions that its own metadata asks for, which are linked from
the environment of the tests instead of installed again. Interpreters run with -S, so that nothing else is on the path.
"""

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PathDistribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from ranks import patience

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "anabranch"
BASE = {"numpy", "pydantic", "rich", "torch", "typer"}
OPTIONAL = ("matplotlib", "plotly", "pyroute2", "tensorboard", "torchvision", "transformers", "pytest", "hypothesis")
DEADLINE_S = 100  # for one command, on a machine that may be busy
CLUSTER = "ring:ranks=16,alpha=30us,rate=10gbit"

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="the project is not beside its tests")


def run(arguments: Sequence[str], folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S * patience(),
        check=False,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("built")
    done = run(["-m", "hatchling", "build", "-d", str(folder)], ROOT)
    assert done.returncode == 0, done.stderr
    return folder


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel and its requirements, and an empty working folder."""

    packages: Path
    requirements: Path
    folder: Path

    @property
    def path(self) -> str:
        return os.pathsep.join(map(str, (self.packages, self.requirements)))

    def python(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return run(["-S", *arguments], self.folder, PYTHONPATH=self.path, OMP_NUM_THREADS="1")

    def command(self, *arguments: str) -> str:
        """What ``anabranch`` prints on success."""
        done = self.python("-m", "anabranch", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def error(self, *arguments: str) -> str:
        """The one line that ``anabranch`` prints on failure."""
        done = self.python("-m", "anabranch", *arguments)
        assert done.returncode == 2 and done.stdout == ""
        (line,) = done.stderr.splitlines()
        return line


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    root = tmp_path_factory.mktemp("installed")
    packages, requirements, folder = (root / name for name in ("packages", "requirements", "work"))
    for made in (requirements, folder):
        made.mkdir()
    (wheel,) = built.glob("*.whl")
    done = run(["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(packages), str(wheel)], root)
    assert done.returncode == 0, done.stderr
    link_requirements(packages, requirements)
    return Installed(packages, requirements, folder)


def required(metadata: Sequence[str] | None) -> set[str]:
    """Names of the distributions that are required here when no extra is asked for."""
    wanted = [Requirement(line) for line in metadata or ()]
    return {canonicalize_name(w.name) for w in wanted if w.marker is None or w.marker.evaluate({"extra": ""})}


def link_requirements(packages: Path, folder: Path) -> None:
    """Link into ``folder`` every distribution that the package in ``packages`` requires, directly or not."""
    (metadata,) = packages.glob("anabranch-*.dist-info")
    missing = required(PathDistribution(metadata).requires)
    assert missing == BASE
    done: set[str] = set()
    while missing:
        name = missing.pop()
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():  # several may share a folder, such as nvidia/
                (folder / top).symlink_to(Path(str(found.locate_file(top))))
        done.add(name)
        missing |= required(found.requires) - done


def test_the_wheel_and_the_source_distribution_hold_the_whole_package(built: Path) -> None:
    """Also what is no Python: recorded traces, the pieces of the report's page."""
    ours = {
        path.relative_to(SOURCE.parent).as_posix()
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"anabranch/values/traces/resnet50.json", "anabranch/py.typed"} <= ours
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == ours
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {f"src/{name}" for name in ours} <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "constraints.txt"} <= names


def test_every_pin_installs_on_the_oldest_python() -> None:
    """Debian 12 has 3.11.2. Looked up where a pin is what is installed, as it is where `make` has set up."""
    oldest = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    (minimum,) = (specifier.version for specifier in oldest)
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line[1:])
    installed = {canonicalize_name(found.metadata["Name"]): found for found in distributions()}
    refused = {
        name: needs
        for name, version in pins.items()
        if (found := installed.get(canonicalize_name(name))) is not None and found.version == version
        if "Requires-Python" in found.metadata
        if f"{minimum}.0" not in SpecifierSet(needs := found.metadata["Requires-Python"])
    }
    assert not refused


def test_nothing_optional_is_there(installed: Installed) -> None:
    code = (
        "import importlib.util as u, sys, anabranch; print(anabranch.__file__);"
        f"print([name for name in {OPTIONAL} if u.find_spec(name)])"
    )
    done = installed.python("-c", code)
    assert done.stdout.splitlines() == [str(installed.packages / "anabranch" / "__init__.py"), "[]"], done.stderr


def test_it_plans_simulates_and_compares(installed: Installed) -> None:
    what = ("--trace", "resnet50", "--network", CLUSTER)
    installed.command("plan", *what, "-o", "plan.json")
    simulated = json.loads(installed.command("simulate", *what, "--plan", "plan.json", "--json"))
    compared = json.loads(installed.command("compare", *what, "--json"))
    assert (simulated["command"], compared["command"]) == ("simulate", "compare")


@pytest.mark.campaign
def test_a_command_whose_extra_is_missing_says_which_in_one_line(installed: Installed) -> None:
    needs = "which is not installed: pip install 'anabranch"
    what = ("--trace", "vgg16", "--network", CLUSTER)
    installed.command("plan", *what, "-o", "one.json")
    installed.command("simulate", *what, "--plan", "one.json", "-o", "timeline.json")
    assert f"anabranch report needs plotly, {needs}[report]'" in installed.error("report", "timeline.json", "one.json")
    assert f"anabranch lab needs pyroute2, {needs}[lab]'" in installed.error("lab", "--rate", "1gbit", "--", "true")
    model = installed.error("record", "resnet50", "--device", "cpu", "-o", "trace.json")
    assert f"the model resnet50 needs torchvision, {needs}[models]' 'torch==" in model


TRAINING = """
import sys
import torch, torch.distributed as dist
import anabranch as ab
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(rank)
model = ab.DataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = torch.randn(32, 64), torch.randn(32, 8)
losses = []
for step in range(12):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
both = [torch.zeros_like(mine) for _ in range(2)]
dist.all_gather(both, mine)
print(torch.equal(*both), losses[-1] < losses[0], model.explain().startswith("anabranch: "))
model.close()
dist.destroy_process_group()
"""


@pytest.mark.campaign
def test_it_trains_on_two_ranks(installed: Installed) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", TRAINING, str(rank), str(installed.folder / "rendezvous")],
            cwd=installed.folder,
            env={**os.environ, "PYTHONPATH": installed.path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=DEADLINE_S * patience())
            assert (rank.returncode, out) == (0, "True True True\n"), err
    finally:
        for rank in ranks:
            rank.kill()
