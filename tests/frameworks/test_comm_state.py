"""The files of ranks beside a framework's checkpoint: all are found again, also by another number of ranks."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import anabranch as ab
from anabranch.frameworks.comm_state import load_rank_files, save_rank_file
from ranks import on_ranks


def wrapped(compress: Any) -> ab.DataParallel:
    torch.manual_seed(0)
    plan = ab.Plan((ab.Bucket(("weight",), collective="oktopk:0.1"), ab.Bucket(("bias",)))) if compress else None
    return ab.DataParallel(nn.Linear(64, 64), compress=compress, plan=plan)


def step(model: ab.DataParallel, rank: int) -> None:
    torch.manual_seed(rank)
    model(torch.randn(4, 64)).square().sum().backward()


def save(rank: int, folder: str) -> torch.Tensor:
    """What waits on this rank after two steps, and is saved."""
    for compress, part in ((None, "dense"), (ab.OkTopk(density=0.1), "sparse")):
        model = wrapped(compress)
        for _ in range(2):
            step(model, rank)
        save_rank_file(model, Path(folder) / part)
    residual: torch.Tensor = model.comm_state_dict()["residuals"]["weight"]
    return residual


def load(rank: int, folder: str) -> torch.Tensor:
    """What waits on this rank after loading."""
    model = wrapped(ab.OkTopk(density=0.1))
    load_rank_files(model, folder)
    residual: torch.Tensor = model.comm_state_dict()["residuals"].get("weight", torch.zeros(64 * 64))
    step(model, rank)  # in which ranks compare what they loaded
    return residual


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_residuals_come_back_on_as_many_ranks_or_on_others(ranks: int, tmp_path: Path) -> None:
    saved = on_ranks(save, 2, str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "sparse").iterdir()) == ["anabranch_rank0.pt", "anabranch_rank1.pt"]
    loaded = on_ranks(load, ranks, str(tmp_path / "sparse"))
    if ranks == 2:
        assert all(torch.equal(now, before) for now, before in zip(loaded, saved, strict=True))
    waiting = torch.stack(saved).sum(dim=0)
    assert torch.allclose(torch.stack(loaded).sum(dim=0), waiting, atol=1e-5) and waiting.any()


class NeverLoaded:
    """As much of a model as is used before it loads; a real one would wait for rank 0."""

    process_group = property(lambda self: dist.group.WORLD)

    def comm_state_dict(self) -> dict[str, Any]:
        return {}

    def load_comm_state_dict(self, *states: Any) -> None:
        raise AssertionError("loaded")


def without(rank: int, folder: str) -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("anabranch").addHandler(handler)
    load_rank_files(wrapped(None), Path(folder) / "nothing")
    load_rank_files(wrapped(ab.OkTopk(density=0.1)), Path(folder) / "dense")
    assert not messages
    load_rank_files(wrapped(ab.OkTopk(density=0.1)), Path(folder) / "nothing")
    assert "training goes on without residuals" in messages[0]

    with pytest.raises(ValueError, match="this model has none"):
        load_rank_files(wrapped(None), Path(folder) / "sparse")
    dist.barrier()
    lost = Path(folder) / "sparse" / "anabranch_rank1.pt"
    if rank == 0:
        lost.unlink()
    dist.barrier()
    if rank == 1:
        model: Any = NeverLoaded()
        with pytest.raises(ab.FileError, match="all ranks have saved"):
            load_rank_files(model, Path(folder) / "sparse")
        torch.save([1, 2], lost)
        with pytest.raises(ab.FileError, match=r"holds \[1, 2\]"):
            load_rank_files(model, Path(folder) / "sparse")


def test_files_that_are_missing_or_of_something_else(tmp_path: Path) -> None:
    on_ranks(save, 2, str(tmp_path))
    on_ranks(without, 2, str(tmp_path))
