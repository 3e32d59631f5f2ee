"""anabranch memory: what the library predicts, and what fits."""

from pathlib import Path

import pytest
import torch
from torch import nn

from anabranch.planning.footprint import KINDS, Setting
from anabranch.tools.bench import zoo
from anabranch.tools.cli.main import main
from anabranch.tools.cli.memory import AUTO_AS, network_of
from anabranch.tools.predict.memory.estimator import OPTIMIZERS
from anabranch.tools.predict.memory.probe import Loss, probe
from anabranch.tools.predict.memory.training_modes import DEFAULT_MODES, modes_of, predict
from anabranch.tools.report.documents import MemoryDocument, MemoryMode
from anabranch.tools.report.memory import memory_tables
from anabranch.values.kinds.options import OkTopk
from tools.cli.nouns import error_of, json_of
from tools.predict.memory.models import images

ASKED = ["memory", "--model", "resnet50", "--batch-size", "4"]
NETWORK = "ring:ranks=4,alpha=30us,rate=10gbit"


@pytest.fixture(autouse=True)
def small_zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision may not be here: every model of the zoo is a small one."""

    def built(name: str, device: torch.device, batch: int) -> tuple[nn.Module, Loss]:
        return images(batch)(device)

    monkeypatch.setattr(zoo, "model_and_loss", built)


def test_numbers_are_what_the_library_says(capsys: pytest.CaptureFixture[str]) -> None:
    document = json_of(capsys, *ASKED, "--ranks", "8", "--optimizer", "adamw", "--compress", "oktopk:0.02")
    profile = probe(images(4), OPTIMIZERS["adamw"])
    assert list(document["modes"]) == list(DEFAULT_MODES)
    for mode, row in document["modes"].items():
        expected = predict(profile, mode, Setting(ranks=8, density=0.02))
        assert row["kinds"] == expected.kinds and row["predicted_nbytes"] == expected.nbytes
        assert row["at"] == expected.at


def test_the_table_has_every_kind_and_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--within", "1GiB", "--network", NETWORK]) == 0
    out = capsys.readouterr().out
    assert all(
        word in out
        for kind in (*KINDS[:-3], "exchange", *DEFAULT_MODES, "predicted", "more than", "largest batch", "Assumed: ")
        for word in kind.split()
    )


def test_small_models_are_told_in_mib(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ASKED) == 0
    out = capsys.readouterr().out
    assert "4 ranks, MiB" in out and "GiB" not in out


def document_of(**nbytes: int) -> MemoryDocument:
    """A model that has weights only, this many bytes in each mode."""
    modes = {mode: MemoryMode(kinds={"weights": n}, predicted_nbytes=n) for mode, n in nbytes.items()}
    return MemoryDocument(model="m", batch_size=1, ranks=2, optimizer="sgd", modes=modes)


def test_large_models_are_told_in_gib() -> None:
    for nbytes, unit in ((2**30, "GiB"), (2**30 - 1, "MiB")):
        assert memory_tables(document_of(ddp=nbytes))[0].title == f"m, batch 1, sgd, 2 ranks, {unit}"


def test_the_largest_batch_looked_at_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tiny(name: str, device: torch.device, batch: int) -> tuple[nn.Module, Loss]:
        x = torch.zeros(batch, 1, device=device)
        return nn.Linear(1, 1, device=device), lambda model: model(x).sum()

    monkeypatch.setattr(zoo, "model_and_loss", tiny)
    limited = "no batch above 65536 was looked at"
    document = json_of(capsys, *ASKED, "--within", "16GiB")
    assert document["largest_batch"]["ddp"] == 65536 and limited in document["assumptions"]
    assert limited not in json_of(capsys, *ASKED, "--within", "1MiB")["assumptions"]


def test_the_largest_batch_fits_in_what_blocks_leave(capsys: pytest.CaptureFixture[str]) -> None:
    document = json_of(capsys, *ASKED, "--within", "100MiB")
    found: dict[str, int] = document["largest_batch"]
    assert found["ddp"] >= found["oktopk"] > 0
    for mode in ("ddp", "lean"):
        fits, too_much = (
            predict(probe(images(found[mode] + more), OPTIMIZERS["momentum"]), mode).nbytes for more in (0, 1)
        )
        assert fits <= 0.95 * 100 * 2**20 < too_much


def test_many_modes_are_rows_that_80_columns_hold(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [*ASKED, "--within", "1GiB", "--network", NETWORK, "--compress", "auto", "--compress", "oktopk"]
    monkeypatch.setattr("anabranch.tools.cli.output.PIPED_WIDTH", 80)
    assert main(asked) == 0
    lines = capsys.readouterr().out.partition("Assumed: ")[0].splitlines()
    assert max(map(len, lines)) <= 80
    modes = [*DEFAULT_MODES[:3], *modes_of("auto"), *modes_of("oktopk")]
    kinds, peaks = memory_tables(document_of(**{**dict.fromkeys(modes, 2**29), "ddp": 2**30}))
    assert [row[0].text for row in kinds.rows] == [row[0].text for row in peaks.rows] == list(dict.fromkeys(modes))
    assert [cell.text for cell in kinds.rows[-1][1:]] == ["0.50", "–"]
    assert [cell.text for cell in peaks.rows[-1][1:]] == ["0.50", "-0.50"]
    assert all(any(line.startswith(mode) for line in lines) for mode in DEFAULT_MODES)


def test_recomputed_activations_let_lean_take_more(capsys: pytest.CaptureFixture[str]) -> None:
    kept = json_of(capsys, *ASKED, "--within", "16GiB")["largest_batch"]
    again = json_of(capsys, *ASKED, "--within", "16GiB", "--activations", "recompute")["largest_batch"]
    assert again["ddp"] == kept["ddp"] and again["lean"] >= kept["lean"]


def test_a_network_by_name_takes_the_ranks() -> None:
    network = network_of("10gbe", 3)
    assert network is not None and network.world_size == 3
    network = network_of("10gbe", None)
    assert network is not None and network.world_size == 4


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--within", "16"], "--within is '16': expected a size in GiB, MiB, GB or MB, such as 16GiB"),
        (["--within", "1e400GiB"], "--within is '1e400GiB': expected a size"),
        (["--compress", "oktopk:0"], "expected a density in (0, 1]"),
        (["--network", "ring:ranks=4,alpha=1us,rate=fast"], "rate is 'fast', expected a rate in bit"),
    ],
)
def test_wrong_requests_are_told(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in error_of(capsys, *ASKED, *argv)


OWN = """
import torch
from torch import nn

def build(batch, device):
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    model = nn.Sequential(*blocks).to(device)
    given = torch.randn(batch, 64, device=device)
    return model, lambda wrapped: wrapped(given).square().mean()

def wrong(batch, device):
    return 1, 2
"""


def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str = OWN) -> str:
    """The name of a module of the user's, in the working directory."""
    monkeypatch.chdir(tmp_path)
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(program, "utf-8")
    return name


def test_a_model_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["memory", "--model", f"{own(tmp_path, monkeypatch)}:build", "--batch-size", "524288"]
    ways = {way: json_of(capsys, *asked, "--activations", way)["modes"] for way in ("keep", "recompute")}
    held = {way: modes["lean"]["kinds"]["activations"] for way, modes in ways.items()}
    assert held["recompute"] < held["keep"] / 3  # of six blocks one is there at a time
    assert ways["recompute"]["ddp"] == ways["keep"]["ddp"]


WRONG = """
import torch
from torch import nn

def linear(device):
    return nn.Linear(6, 4, device=device)

def inputs(batch, device):
    return torch.ones(batch, 6, device=device)

def asks_nothing():
    return linear("cpu"), lambda model: model(inputs(8, "cpu")).sum()

def raises(batch, device):
    raise KeyError("data")

def leaves(batch, device):
    raise SystemExit(0)

def model_alone(batch, device):
    return linear(device)

def loss_asks(batch, device):
    return linear(device), lambda model, inputs: model(inputs).sum()

def no_loss(batch, device):
    return linear(device), lambda model: print(end="")

def not_one_number(batch, device):
    return linear(device), lambda model: model(inputs(batch, device))

def asks_for_values(batch, device):
    return linear(device), lambda model: model(inputs(batch, device)).sum().item()

def inputs_elsewhere(batch, device):
    return linear(device), lambda model: model(inputs(batch, "cpu")).sum()

def model_elsewhere(batch, device):
    return linear("cpu"), lambda model: model(inputs(batch, "cpu")).sum()

def frozen(batch, device):
    return linear(device).requires_grad_(False), lambda model: model(inputs(batch, device)).sum()

class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise TypeError("a bug")

def backward_fails(batch, device):
    return linear(device), lambda model: Wrong.apply(model(inputs(batch, device))).sum()

def detached(batch, device):
    return linear(device), lambda model: model(inputs(batch, device)).detach().sum()

def backward_fails_on_many(batch, device):
    last = Wrong.apply if batch > 8 else torch.clone
    return linear(device), lambda model: last(model(inputs(batch, device))).sum()

def one_batch_alone(batch, device):
    return linear(device), lambda model: model(inputs(batch, device)).view(4, 4).sum()
"""
WRONG_USES = [
    ("asks_nothing", "asks_nothing() takes 0 positional arguments but 2 were given; expected module:function"),
    ("raises", "py:15: 'data'; expected module:function, where function(batch, device) returns a model and its loss"),
    ("leaves", "leaves(4, 'meta') raised SystemExit at "),
    ("model_alone", "returned (Linear), expected (model, loss)"),
    ("loss_asks", "missing 1 required positional argument: 'inputs'; expected one that runs on the device"),
    ("no_loss", "its loss is a NoneType, expected one number that depends on a trained parameter"),
    ("not_one_number", "its loss is a tensor of shape [4, 4] with requires_grad=True, expected one number"),
    ("asks_for_values", "Tensor.item() cannot be called on meta tensors; expected one that runs on the device that"),
    ("inputs_elsewhere", "its loss of a model on 'meta' raised RuntimeError at "),
    ("model_elsewhere", "weight of its model is on cpu, expected on meta, the device that model_elsewhere was given"),
    ("frozen", "its loss is a tensor of shape [] with requires_grad=False, expected one number"),
    ("detached", "its loss is a tensor of shape [] with requires_grad=False, expected one number"),
    ("backward_fails_on_many", "its backward raised TypeError at "),
    ("backward_fails", "its backward raised TypeError at "),
    ("one_batch_alone", "shape '[4, 4]' is invalid for input of size 32; expected one that runs"),
]


@pytest.mark.parametrize(("name", "says"), WRONG_USES)
def test_what_ones_own_function_does_wrong_is_one_error(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = own(tmp_path, monkeypatch, WRONG)
    asked = ["memory", "--model", f"{module}:{name}", "--batch-size", "4", "--within", "1GiB"]
    error = error_of(capsys, *asked)
    assert f"{module}:{name}: " in error and says in error


def test_a_function_that_returns_something_else_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = own(tmp_path, monkeypatch)
    told = error_of(capsys, "memory", "--model", f"{name}:wrong", "--batch-size", "4")
    assert f"{name}:wrong: returned (int, int), expected (model, loss)" in told
    told = error_of(capsys, "memory", "--model", f"{name}:missing", "--batch-size", "4")
    assert f"{name}:missing: no function 'missing'" in told and "function(batch, device)" in told


def test_other_ways_to_compress(capsys: pytest.CaptureFixture[str]) -> None:
    document = json_of(capsys, *ASKED, "--compress", "int4", "--compress", "int8", "--network", NETWORK)
    assert list(document["modes"]) == ["ddp", "lean, dense", *modes_of("int4"), "int8", "lean, int8"]
    profile = probe(images(4), OPTIMIZERS["momentum"])
    for mode, row in document["modes"].items():
        expected = predict(profile, mode, Setting(ranks=4))
        assert row["kinds"] == expected.kinds
    assert document["modes"]["int4"]["kinds"]["residual"] > 0 == document["modes"]["int8"]["kinds"]["residual"]
    both = json_of(capsys, *ASKED, "--compress", "oktopk", "--compress", "bf16")["modes"]
    assert list(both) == [*DEFAULT_MODES, "bf16", "lean, bf16"]
    assert "--compress is 'fp8': expected bf16, int8, int4, auto" in error_of(capsys, *ASKED, "--compress", "fp8")
    ladder = error_of(capsys, *ASKED, "--compress", "auto:int8")
    assert "--compress is 'auto:int8': expected auto, or the least faithful kind of that ladder itself" in ladder


def test_auto_needs_the_memory_of_int4(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*ASKED, "--within", "1GiB", "--network", NETWORK, "--compress"]
    auto, int4 = (json_of(capsys, *asked, kind) for kind in ("auto", "int4"))
    assert list(auto["modes"]) == ["ddp", "lean, dense", *modes_of("auto")]
    assert list(auto["modes"].values()) == list(int4["modes"].values())
    assert list(auto["largest_batch"].values()) == list(int4["largest_batch"].values())
    assert AUTO_AS in auto["assumptions"] and AUTO_AS not in int4["assumptions"]


def test_the_density_and_the_wire_of_oktopk(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*ASKED, "--network", NETWORK, "--compress"]
    plain, packed = (json_of(capsys, *asked, way) for way in ("oktopk:0.05", "oktopk:0.05:bf16"))
    profile = probe(images(4), OPTIMIZERS["momentum"])
    setting = Setting(ranks=4, density=0.05, options=OkTopk(wire="bf16"))
    for mode, row in packed["modes"].items():
        assert row["kinds"] == predict(profile, mode, setting).kinds
    assert plain["density"] == packed["density"] == 0.05
    assert packed["modes"]["oktopk"]["kinds"]["send"] < plain["modes"]["oktopk"]["kinds"]["send"]
    assert "Ok-Topk sends values as bf16" in packed["assumptions"]
    twice = error_of(capsys, *asked, "oktopk:0.05", "--compress", "oktopk:bf16")
    assert "--compress is oktopk:0.05 and oktopk:bf16: expected one density and one wire" in twice
    assert "'oktopk:2:bf16': expected a density in (0, 1]" in error_of(capsys, *asked, "oktopk:2:bf16")
    assert "how values are sent (fp32, bf16, int8)" in error_of(capsys, *asked, "oktopk:0.01:fp8")


def test_models_that_fsdp2_shards(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*ASKED, "--ranks", "4", "--sharded", "fsdp2", "--sharded", "fsdp2:reshard"]
    document = json_of(capsys, *asked, "--within", "1GiB", "--network", NETWORK)
    assert list(document["modes"]) == [*DEFAULT_MODES, "fsdp2", "fsdp2:reshard"]
    profile = probe(images(4), OPTIMIZERS["momentum"])
    for mode in ("fsdp2", "fsdp2:reshard"):
        assert document["modes"][mode]["predicted_nbytes"] == predict(profile, mode, Setting(ranks=4)).nbytes
        assert document["largest_batch"][mode] > 0
    assert any("units of fsdp2 and hsdp" in line for line in document["assumptions"])
    refused = error_of(capsys, *ASKED, "--sharded", "fsdp2:planned")
    assert "--sharded is 'fsdp2:planned': expected one of fsdp2, fsdp2:reshard, hsdp" in refused


def test_models_that_are_sharded_inside_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*ASKED, "--ranks", "16", "--sharded", "hsdp"]
    four = "two_level:ranks=16,per_node=4,alpha=50us,rate=10gbit,inside_alpha=5us,inside_rate=200gbit"
    document = json_of(capsys, *asked, "--network", four, "--within", "1GiB")
    profile = probe(images(4), OPTIMIZERS["momentum"])
    expected = predict(profile, "hsdp", Setting(ranks=16, ranks_per_node=4)).nbytes
    assert document["modes"]["hsdp"]["predicted_nbytes"] == expected and document["largest_batch"]["hsdp"] > 0
    assert "hsdp: 4 nodes of 4 ranks, each with one copy of the model" in document["assumptions"]
    with_nodes = json_of(capsys, *asked, "--network", "nvlink+25gbe")
    refused = error_of(capsys, *ASKED, "--sharded", "hsdp:reshard@int4", "--network", "nvlink+25gbe")
    assert "memory is predicted for dense averages between nodes, so give hsdp:reshard; int4" in refused
    assert "hsdp: 2 nodes of 8 ranks, each with one copy of the model" in with_nodes["assumptions"]
    for more in ([], ["--network", NETWORK]):
        assert "--sharded is hsdp, which shards inside nodes: expected a --network with" in error_of(
            capsys, *asked, *more
        )


def test_two_level_exchanges_hold_a_share_of_residuals_and_messages(capsys: pytest.CaptureFixture[str]) -> None:
    four = "two_level:ranks=16,per_node=4,alpha=50us,rate=10gbit,inside_alpha=5us,inside_rate=200gbit"
    asked = [*ASKED, "--compress", "int4@nodes", "--compress", "dense@nodes", "--compress", "oktopk:0.05@nodes"]
    document = json_of(capsys, *asked, "--compress", "int4", "--network", four)
    assert "@nodes: 4 ranks per node, each with its share of residuals and messages" in document["assumptions"]
    kinds = {mode: row["kinds"] for mode, row in document["modes"].items()}
    assert kinds["int4@nodes"]["residual"] == pytest.approx(kinds["int4"]["residual"] / 4, rel=0.01)
    assert kinds["oktopk@nodes"]["residual"] == pytest.approx(kinds["int4"]["residual"] / 4, rel=0.05)
    assert kinds["dense@nodes"]["residual"] == 0 and "lean, int4@nodes" not in kinds
    profile = probe(images(4), OPTIMIZERS["momentum"])
    setting = Setting(ranks=16, density=0.05, ranks_per_node=4)
    for mode in ("int4@nodes", "dense@nodes"):
        assert document["modes"][mode]["predicted_nbytes"] == predict(profile, mode, setting).nbytes
    # with one rank in each node it is the flat exchange, but for the stages inside
    alone, flat = (predict(profile, mode, Setting(ranks=4)) for mode in ("int4@nodes", "int4"))
    assert alone.kinds["residual"] == flat.kinds["residual"] and alone.nbytes >= flat.nbytes
    for more in ([], ["--network", NETWORK]):
        refused = error_of(capsys, *ASKED, "--compress", "int4@nodes", *more)
        assert "--compress is int4@nodes, which sums inside nodes: expected a --network with nodes" in refused


def test_the_difference_to_ddp_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--compress", "int8"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.partition("At the peak, MiB")[2].splitlines()]
    rows = [line for line in lines if len(line) > 2 and line[-1][0] in "+-" and line[-1][1:2].isdigit()]
    peaks, more = ([float(row[at]) for row in rows] for at in (-2, -1))
    assert len(rows) == 4 and more == pytest.approx([peak - peaks[0] for peak in peaks], abs=0.011)


def test_bf16_is_autocast(capsys: pytest.CaptureFixture[str]) -> None:
    document = json_of(capsys, *ASKED, "--precision", "bf16")
    profile = probe(images(4), OPTIMIZERS["momentum"], half=True)
    assert document["modes"]["ddp"]["predicted_nbytes"] == predict(profile, "ddp").nbytes
    assert any("autocast to bfloat16" in said for said in document["assumptions"])
    full = json_of(capsys, *ASKED)["modes"]["ddp"]["kinds"]
    assert document["modes"]["ddp"]["kinds"]["weights"] == full["weights"]
    assert document["modes"]["ddp"]["kinds"]["activations"] < full["activations"]
