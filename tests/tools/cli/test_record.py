"""anabranch record: a user's own function, a named model, and errors that are one line."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from anabranch import Trace, load
from anabranch.tools.cli.main import main
from tools.cli.nouns import error_of, json_of

PROGRAM = """
import torch
from torch import nn

number = 3

def setup():
    import beside
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    def step():
        beside.calls.append(1)
        model(torch.ones(5, 6)).sum().backward()
    return model, step

def nothing():
    return None

def not_a_model():
    return 3, setup

def not_a_step():
    return setup()[0], 3

def asks():
    return setup()[0], lambda model: model(torch.ones(5, 6)).sum().backward()

def raises():
    raise RuntimeError("no data\\nhere")

def configured(options):
    return setup()

def leaves():
    raise SystemExit(0)

def step_fails():
    model = nn.Linear(6, 4)
    return model, lambda: model(torch.ones(5, 7)).sum().backward()

def data_ends():
    model, batches = nn.Linear(6, 4), iter([torch.ones(5, 6)] * 3)
    return model, lambda: model(next(batches)).sum().backward()

def other_model():
    return nn.Linear(6, 4), setup()[1]

def frozen():
    model, step = setup()
    return model.requires_grad_(False), lambda: model(torch.ones(5, 6))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user who wrote ``mine.py``."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("calls = []\n")
    (tmp_path / "broken.py").write_text("import no_such_library\n")
    (tmp_path / "wrong.py").write_text("def setup(:\n")
    (tmp_path / "program.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("mine", "beside", "broken", "wrong", "program"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_ones_own_function(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "mine:setup", "-o", "trace.json", "--steps", "3", "--warmup", "2"]) == 0
    out, err = capsys.readouterr()
    assert "4 tensors" in out and "Written to trace.json" in out and err == ""
    trace = load("trace.json")
    assert isinstance(trace, Trace)
    assert {tensor.name for tensor in trace.tensors} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert trace.tensors[-1].name.startswith("0.")
    assert (trace.meta["steps"], trace.meta["model"]) == (3, "Sequential")
    assert trace.meta["recorded_from"] == "mine:setup" and "batch" not in trace.meta
    assert len(sys.modules["beside"].calls) == 5


def test_the_batch_of_ones_own_function_is_noted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_of(capsys, "record", "mine:setup", "-o", "trace.json", "--steps", "1", "--warmup", "0", "--batch", "5")
    swept = ["scale", "--trace", "trace.json", "--network", "10gbe", "--world-sizes", "4", "--batch", "10"]
    assert {point["samples_per_s"] is not None for point in json_of(capsys, *swept)["points"]} == {True}


def test_json_and_force(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["record", "mine:setup", "-o", "trace.json", "--steps", "2", "--warmup", "0"]
    document = json_of(capsys, *argv)
    assert (document["command"], document["tensors"], document["written"]) == ("record", 4, "trace.json")
    assert document["nbytes"] == 4 * (6 * 4 + 4 + 4 * 2 + 2)
    before = Path("trace.json").read_bytes()
    assert "trace.json: is already there" in error_of(capsys, *argv)
    assert Path("trace.json").read_bytes() == before
    json_of(capsys, *argv, "--force")
    assert Path("trace.json").read_bytes() != before


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (
            "absent:setup",
            "importing 'absent' raised ModuleNotFoundError: No module named 'absent'; expected a function of yours",
        ),
        ("broken:setup", "broken.py:1: No module named 'no_such_library'"),
        (":setup", "importing '' raised ValueError"),
        (".mine:setup", "importing '.mine' raised TypeError: "),
        ("wrong:setup", "importing 'wrong' raised SyntaxError: invalid syntax (wrong.py, line 1); expected a function"),
        ("program:setup", "program.py:2: 0; expected a function of yours"),
        ("sys:absent", "no function 'absent' in sys (not there)"),
        ("mine:absent", "no function 'absent' in"),
        ("mine:", "no function ''"),
        ("mine:number", "'number' is of type int"),
        ("mine:nothing", "returned (NoneType), expected (model, step)"),
        ("mine:not_a_model", "returned (int, function), expected (model, step)"),
        ("mine:not_a_step", "returned (Sequential, int), expected (model, step)"),
        (
            "mine:asks",
            "its step() raised TypeError: asks.<locals>.<lambda>() missing 1 required positional argument: 'model'",
        ),
        ("mine:raises", "mine.py:28: no data here; expected a function that returns (model, step); call it in Python"),
        ("mine:configured", "configured() missing 1 required positional argument: 'options'; expected a function"),
        ("mine:leaves", "leaves() raised SystemExit at "),
        ("mine:step_fails", "shapes cannot be multiplied (5x7 and 6x4); expected one that runs a forward and a back"),
        ("mine:data_ends", "its step() raised StopIteration at "),
        ("mine:other_model", "no step was recorded: run forward and backward of this very model"),
        ("mine:frozen", "no parameter requires a gradient"),
        ("resnet51", "resnet51: expected a function of yours as module:function, such as train:setup, or one of goog"),
    ],
)
def test_what_cannot_be_recorded(what: str, says: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in error_of(capsys, "record", what, "-o", "trace.json")
    assert not Path("trace.json").exists()


MISFITS = [
    (["--precision", "bf16"], "--precision is for named models"),
    (["--device", "cpu"], "--device is for named models"),
    (["--steps", "0"], "--steps"),
    (["--warmup", "-1"], "--warmup"),
]


def test_options_that_do_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, says in MISFITS:
        assert says in error_of(capsys, "record", "mine:setup", "-o", "trace.json", *options)


def test_a_library_that_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    error = error_of(capsys, "record", "resnet50", "-o", str(tmp_path / "t.json"), "--device", "cpu")
    assert (
        "the model resnet50 needs torchvision, which is not installed: pip install 'anabranch[models]' 'torch=="
        in error
    )


@pytest.mark.parametrize(
    "breaks",
    [
        "raise RuntimeError('operator torchvision::nms does not exist\\nand more')",
        "raise ImportError('libtorch.so: undefined symbol')",
        "",  # a package without the model
    ],
)
def test_a_library_that_does_not_match_torch(
    breaks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "torchvision"
    library.mkdir()
    (library / "__init__.py").write_text(breaks)
    (library / "models.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    error = error_of(capsys, "record", "resnet50", "-o", str(tmp_path / "t.json"), "--device", "cpu")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    assert "the model resnet50 needs torchvision, which is installed and cannot be imported (" in error
    assert "Traceback" not in error and "and more" not in error
    assert "--force-reinstall torchvision 'torch==" in error


def test_a_device_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = str(tmp_path / "t.json")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no GPU here" in error_of(capsys, "record", "gpt2", "-o", output, "--device", "cuda")
    assert "'tpu' is not one of 'cpu', 'cuda'" in error_of(capsys, "record", "gpt2", "-o", output, "--device", "tpu")
    assert "--precision" in error_of(capsys, "record", "gpt2", "-o", output, "--precision", "int4")


class Tiny(nn.Module):
    """Takes images and returns logits, as the models of torchvision do."""

    def __init__(self, weights: None) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fc(images.mean(dim=(2, 3)))
        return result


def test_a_named_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    models = ModuleType("torchvision.models")
    monkeypatch.setattr(models, "resnet50", Tiny, raising=False)
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    output = tmp_path / "t.json"
    argv = ["record", "resnet50", "-o", str(output), "--device", "cpu", "--precision", "bf16", "--batch", "2"]
    assert json_of(capsys, *argv, "--steps", "2", "--warmup", "0")["tensors"] == 2
    trace = load(output)
    assert isinstance(trace, Trace)
    meta = trace.meta
    assert (meta["model"], meta["batch"]) == ("resnet50", 2)
    assert str(meta["precision"]).startswith("bf16 autocast")
