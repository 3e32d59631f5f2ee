"""anabranch.frameworks.lightning with the real Lightning, on two ranks."""

import io
import re
import sys
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import anabranch as ab
from anabranch.frameworks.comm_state import unpacked
from frameworks.lightning_runs import (
    BATCHES,
    DENSE_PLAN,
    batches,
    classifier,
    fit,
    lightning,
    sparse,
    strategy,
    weights,
)
from ranks import on_ranks

pytestmark = [
    pytest.mark.slow,  # ranks import the framework for seconds
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
]

PAGE = Path(__file__).parents[2] / "docs" / "lightning.md"
IMPORTS_S = 120.0  # two ranks import Lightning, on a machine that others use, too


# ------------------------------------------------------------------------------------------------- as under DDP


def losses_of(rank: int, ways: list[str], epochs: int, manual: bool, options: dict[str, Any]) -> dict[str, Any]:
    pl = lightning(rank)
    import_module("anabranch.frameworks.lightning")
    answers = {}
    for way in ways:
        chosen = strategy(plan=DENSE_PLAN) if way == "a plan" else way
        trainer, module = fit(pl, chosen, epochs, manual=manual, **options)
        answers[way] = {
            "losses": module.losses,
            "validation": float(trainer.callback_metrics["validation"]),
            "wrapper": module.wrapper,
        }
    return answers


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_losses_are_those_of_ddp(manual: bool) -> None:
    """100 steps: 200 batches of which two make a step, or 50 of which each makes two. With BatchNorm's buffers."""
    options = {"limit_train_batches": 10} if manual else {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    epochs, backwards = (5, 100) if manual else (10, 200)
    ways = ["ddp", "anabranch", "a plan"]
    for answers in on_ranks(losses_of, 2, ways, epochs, manual, options, timeout_s=IMPORTS_S):
        ddp = answers.pop("ddp")
        assert ddp["wrapper"] == "DistributedDataParallel"
        assert len(ddp["losses"]) == backwards and ddp["validation"] < ddp["losses"][0] / 2
        for answer in answers.values():
            assert answer["wrapper"] == "DataParallel"
            assert answer["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
            assert answer["validation"] == pytest.approx(ddp["validation"], rel=1e-5)


def by_name(rank: int, package: str) -> str:
    pl = lightning(rank, package)
    import_module("anabranch.frameworks.lightning")
    trainer, module = fit(pl, "anabranch", 1)
    assert type(trainer.strategy).__mro__[1].__module__.startswith(package)
    return f"{module.wrapper} {trainer.strategy.explain()}"


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_both_packages_know_the_strategy_by_name(package: str) -> None:
    if find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed")
    for answer in on_ranks(by_name, 2, package, timeout_s=IMPORTS_S):
        assert answer.startswith("DataParallel anabranch: ")


def alone(rank: int) -> list[int]:
    pl = lightning(rank)
    counts = []
    for manual in (False, True):
        trainer, module = fit(pl, strategy(compress="int8"), 1, manual=manual)
        assert "there is one rank" in trainer.strategy.explain()
        counts.append(len(module.losses))
    return counts


def test_one_rank_trains_without_sending_anything() -> None:
    assert on_ranks(alone, 1, timeout_s=IMPORTS_S) == [[BATCHES, 2 * BATCHES]]


def without_momentum(rank: int, momentum: float) -> list[bool]:
    """Whether each matrix has no momentum in the optimizer, once it has travelled sparse."""
    pl = lightning(rank)
    chosen = sparse(momentum=momentum)
    trainer, module = fit(pl, strategy(**chosen), 1)
    (optimizer,) = trainer.optimizers
    names = [name for bucket in chosen["plan"].buckets if ":" in bucket.collective for name in bucket.names]
    assert names
    return [not optimizer.state[module.get_parameter(name)]["momentum_buffer"].any() for name in names]


def test_the_optimizer_shares_momentum_with_sparse_gradients_by_itself() -> None:
    """Lightning's steps have closures, which make the gradients."""
    for momentum in (0.5, 0.0):
        for found in on_ranks(without_momentum, 2, momentum, timeout_s=IMPORTS_S):
            assert set(found) == {momentum > 0}


# ------------------------------------------------------------------------------------------------- checkpoints


def resumed(rank: int, folder: str, kind: str, forget: bool) -> dict[str, Any]:
    """The weights after three epochs, in one go, and stopped after the second; ``forget``: without residuals."""
    pl = lightning(rank)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}

    def chosen() -> Any:
        return strategy(**sparse()) if kind == "sparse" else strategy(plan=DENSE_PLAN)

    _, whole = fit(pl, chosen(), 3, **options)
    saver = pl.callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    trainer, _ = fit(pl, chosen(), 2, callbacks=[saver], **{**options, "enable_checkpointing": True})
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    answers = {"whole": weights(whole)}
    for path in (f"{folder}/epoch=1.ckpt", f"{folder}/after.ckpt"):
        if forget:
            saved = torch.load(path, weights_only=True)
            del saved["anabranch"]
            path = f"{path}-{rank}"
            torch.save(saved, path)
        _, module = fit(pl, chosen(), 3, path, **options)
        assert len(module.losses) == BATCHES
        answers[Path(path).name.partition(".")[0]] = weights(module)
    return answers


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_stopped_and_resumed_is_as_if_it_had_not_been(kind: str, tmp_path: Path) -> None:
    """From a checkpoint that was saved during fit(), and from one that was saved after it."""
    for answer in on_ranks(resumed, 2, str(tmp_path), kind, False, timeout_s=IMPORTS_S):
        assert torch.equal(answer["epoch=1"], answer["whole"])
        assert torch.equal(answer["after"], answer["whole"])
    for name in ("epoch=0", "epoch=1", "after", "weights"):
        states = torch.load(tmp_path / f"{name}.ckpt", weights_only=True).get("anabranch")
        if kind == "dense" or name == "weights":
            assert states is None
            continue
        first, second = (unpacked(entries) for entries in states)
        assert [first["rank"], second["rank"]] == [0, 1]
        assert first["step"] == second["step"] == BATCHES // 2 * (1 if name == "epoch=0" else 2)
        assert not torch.equal(first["residuals"]["net.0.weight"], second["residuals"]["net.0.weight"])


def test_without_residuals_it_would_not_be_the_same(tmp_path: Path) -> None:
    for answer in on_ranks(resumed, 2, str(tmp_path), "sparse", True, timeout_s=IMPORTS_S):
        assert not torch.equal(answer["epoch=1"], answer["whole"])


def saved(rank: int, path: str, manual: bool) -> float:
    pl = lightning(rank)
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))
    trainer, _ = fit(pl, strategy(**sparse()), 1, manual=manual, plugins=[plugin])
    trainer.save_checkpoint(path)
    return float(plugin.scaler.get_scale())


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_residuals_follow_the_loss_scaler(manual: bool, tmp_path: Path) -> None:
    scales = on_ranks(saved, 2, str(tmp_path / "one.ckpt"), manual, timeout_s=IMPORTS_S)
    states = [unpacked(part) for part in torch.load(tmp_path / "one.ckpt", weights_only=True)["anabranch"]]
    assert scales == [256.0, 256.0] == [state["scale"] for state in states]
    assert [state["step"] for state in states] == [BATCHES * (2 if manual else 1)] * 2


def taken_over(rank: int, path: str) -> dict[str, Any]:
    pl = lightning(rank)
    if not Path(path).exists():
        trainer, _ = fit(pl, strategy(**sparse()), 1)
    else:
        trainer, _ = fit(pl, strategy(**sparse()), 2, path)
    trainer.save_checkpoint(path)
    return {"steps": trainer.global_step}


def test_another_number_of_ranks_takes_the_residuals_over(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    for ranks, steps in ((2, BATCHES), (3, 2 * BATCHES)):
        answers = on_ranks(taken_over, ranks, str(path), timeout_s=IMPORTS_S)
        states = [unpacked(part) for part in torch.load(path, weights_only=True)["anabranch"]]
        assert [state["world_size"] for state in states] == [ranks] * ranks
        assert [state["step"] for state in states] == [answer["steps"] for answer in answers] == [steps] * ranks


# ------------------------------------------------------------------------------------------------- metrics


def logged(rank: int, folder: str) -> list[str]:
    pl = lightning(rank)
    logger = pl.loggers.CSVLogger(folder, name="", version="")
    options = {"logger": logger, "log_every_n_steps": 5, "enable_progress_bar": True}
    trainer, module = fit(pl, strategy(**sparse()), 2, **options)
    trainer.validate(module, batches(), verbose=False)
    return sorted(module.shown)


def test_metrics_are_ordinary_entries_of_loggers_and_progress_bars(tmp_path: Path) -> None:
    shown = on_ranks(logged, 2, str(tmp_path), timeout_s=IMPORTS_S)[0]
    assert "anabranch/exposed_s" in shown and "anabranch/density" not in shown
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    table = [dict(zip(header.split(","), row.split(","), strict=True)) for row in rows]
    densities = [float(row["anabranch/density"]) for row in table if row.get("anabranch/density")]
    assert len(densities) == 2 * BATCHES // 5 and all(0.05 < density < 0.5 for density in densities)
    for name in ("exposed_s", "measured_s", "sent_nbytes"):
        assert all(float(row[f"anabranch/{name}"]) >= 0 for row in table if row["anabranch/density"])


# ------------------------------------------------------------------------------------------------- refusals


def refusals(rank: int) -> dict[str, str]:
    pl = lightning(rank)
    import_module("anabranch.frameworks.lightning")
    answers = {}
    pl.__version__ = "3.1.0"
    del sys.modules["anabranch.frameworks.lightning"]
    with pytest.raises(ab.MissingExtraError) as version:
        import_module("anabranch.frameworks.lightning")
    answers["version"] = str(version.value)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("lightning", "pytorch_lightning")]:
        del sys.modules[name]
    sys.modules.update({"lightning": None, "pytorch_lightning": None})  # type: ignore[dict-item]
    with pytest.raises(ab.MissingExtraError) as missing:
        import_module("anabranch.frameworks.lightning")
    answers["missing"] = str(missing.value)
    return answers


def test_what_cannot_work_is_refused_in_one_sentence() -> None:
    (answers,) = on_ranks(refusals, 1, timeout_s=IMPORTS_S)
    assert answers["version"] == (
        "anabranch.frameworks.lightning was tested with lightning 2.4, 2.5, 2.6, and 3.1.0 is installed: "
        "pip install 'lightning==2.6.*'"
    )
    assert answers["missing"].startswith("anabranch.frameworks.lightning needs lightning, which is not installed")


def failed(rank: int) -> list[str | int]:
    pl = lightning(rank)
    trainer = pl.Trainer(
        strategy=strategy(**sparse()), accelerator="cpu", devices=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = classifier(pl, fails_in=7)
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(module, batches())
    trainer, again = fit(pl, strategy(**sparse()), 1)
    return [str(caught.value), len(module.losses), len(again.losses)]


def test_an_error_in_a_step_is_the_users_and_another_fit_may_follow() -> None:
    assert on_ranks(failed, 2, timeout_s=IMPORTS_S) == [["no such batch", 7, BATCHES]] * 2


# ------------------------------------------------------------------------------------------------- the page


def snippets_run(rank: int, snippets: list[str]) -> list[str]:
    """The wrappers under which each snippet of the page has trained."""
    pl = lightning(rank)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    wrappers = []
    for snippet in snippets:
        names = {"ab": ab, "module": classifier(pl), "loader": batches()}
        names["Trainer"] = partial(pl.Trainer, accelerator="cpu", devices=2, **quiet)
        with redirect_stdout(io.StringIO()):
            exec(snippet, names)
        wrappers.append(names["module"].wrapper)
    return wrappers


def test_snippets_of_the_page_run() -> None:
    snippets = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert on_ranks(snippets_run, 2, snippets, timeout_s=IMPORTS_S) == [["DataParallel"] * 2] * 2
