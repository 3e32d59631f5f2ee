"""Small trainings by Lightning on ranks of tests; Lightning itself is imported on the ranks only."""

import logging
import os
import warnings
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anabranch as ab

BATCHES = 20  # per rank and epoch
PLAN = ab.Plan(
    (
        ab.Bucket(("net.3.bias", "net.3.weight", "net.1.bias", "net.1.weight", "net.0.bias")),
        ab.Bucket(("net.0.weight",), collective="oktopk:0.1"),
    )
)
DENSE_PLAN = ab.Plan((ab.Bucket(PLAN.buckets[0].names), ab.Bucket(PLAN.buckets[1].names)))


def sparse(**options: Any) -> dict[str, Any]:
    """Arguments of a strategy under which training is sparse from the first step on, and repeats bit by bit."""
    return {"plan": PLAN, "compress": ab.OkTopk(density=0.1, deterministic=True, **options), "profile_steps": 0}


def lightning(rank: int, package: str = "lightning.pytorch") -> Any:
    """The package, on a rank of a test that it takes for one of torchrun's."""
    warnings.simplefilter("ignore")  # Lightning's own: about workers of data loaders, and more
    ranks = dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(GROUP_RANK="0", TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    module = import_module(package)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return module


def strategy(**options: Any) -> Any:
    return import_module("anabranch.frameworks.lightning").AnabranchStrategy(**options)


def classifier(pl: Any, manual: bool = False, fails_in: int | None = None) -> Any:
    """A module that notes its losses, what its progress bar shows, and how it was wrapped.

    ``manual``: it makes two steps of every batch, by manual optimization.
    """

    class Classifier(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
            self.automatic_optimization = not manual
            self.losses: list[float] = []
            self.shown: set[str] = set()
            self.wrapper = ""

        def training_step(self, batch: Any, index: int) -> Any:
            if index == fails_in:
                raise RuntimeError("no such batch")
            for _ in range(2 if manual else 1):
                loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
                self.losses.append(loss.item())
                if manual:
                    optimizer = self.optimizers()
                    optimizer.zero_grad()
                    self.manual_backward(loss)
                    optimizer.step()
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validation", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

        def on_train_batch_end(self, *_: Any) -> None:
            self.shown |= set(self.trainer.progress_bar_metrics)
            self.wrapper = type(self.trainer.strategy.model).__name__

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Classifier()


def batches() -> DataLoader[Any]:
    """The same for all ranks; Lightning gives each rank its part of them."""
    generator = torch.Generator().manual_seed(1)
    ranks = dist.get_world_size()
    inputs = torch.randn(BATCHES * 8 * ranks, 16, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(dim=1)), batch_size=8)


def fit(pl: Any, chosen: Any, epochs: int, resume: str | None = None, manual: bool = False, **options: Any) -> Any:
    """Train ``epochs`` epochs in all, with a checkpoint to resume from; the trainer and the module."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        strategy=chosen, accelerator="cpu", devices=dist.get_world_size(), max_epochs=epochs,
        enable_model_summary=False, use_distributed_sampler=True, **{**quiet, **options},
    )  # fmt: skip
    module = classifier(pl, manual)
    trainer.fit(module, batches(), batches(), ckpt_path=resume)
    return trainer, module


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
