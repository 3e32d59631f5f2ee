"""Train an image classifier by Lightning, on the digits that come with scikit-learn, on several ranks.

    torchrun --standalone --nproc-per-node 2 examples/lightning_module.py

From Lightning's own DDP to anabranch it is one argument of the Trainer; it is marked. With ``--keep run`` the same
command goes on from the last checkpoint after a crash, and ``torchrun --max-restarts 3`` does so by itself. With
``--compress 0.1`` only the largest tenth of the gradients is sent, the rest later: until then it is in the checkpoints.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import anabranch
from anabranch.frameworks.lightning import AnabranchStrategy

TRAINED_ON = 1500  # of 1797 images; the rest is for validation
BATCH = 25  # images per rank and step


class Digits(lightning.LightningModule):  # type: ignore[misc]
    """A small convolutional network with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            *block(1, 32), *block(32, 64), nn.MaxPool2d(2), *block(64, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(128, 10),
        )  # fmt: skip

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:  # noqa: ARG002 - by this name
        """The loss of one batch."""
        images, digits = batch
        loss = cross_entropy(self.network(images), digits)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:  # noqa: ARG002 - by this name
        """Count the digits that are read."""
        images, digits = batch
        self.log("read", (self.network(images).argmax(dim=1) == digits).float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def block(before: int, after: int) -> list[nn.Module]:
    """Convolution, BatchNorm, ReLU."""
    return [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]


def main() -> None:
    """Train, and on rank 0 say how many digits it reads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrap", choices=["ddp", "anabranch"], default="anabranch")
    parser.add_argument("--compress", type=float, help="send this share of the larger gradients, the rest later")
    parser.add_argument("--plan", type=Path, help="run this plan, whatever comes of it, instead of looking for one")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--keep", type=Path, help="keep checkpoints in this folder, and resume from the last one")
    options = parser.parse_args()

    strategy: Any = "ddp"
    if options.wrap == "anabranch":
        compress = anabranch.OkTopk(density=options.compress, deterministic=True) if options.compress else None
        strategy = AnabranchStrategy(compress=compress, plan=options.plan)  # the one line

    lightning.seed_everything(0)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    training = TensorDataset(images[:TRAINED_ON], torch.tensor(labels)[:TRAINED_ON])
    validation = TensorDataset(images[TRAINED_ON:], torch.tensor(labels)[TRAINED_ON:])
    saver = ModelCheckpoint(options.keep, save_last=True, save_on_train_epoch_end=True)
    trainer = lightning.Trainer(
        strategy=strategy,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=False,
        callbacks=[saver] if options.keep else [],
        enable_checkpointing=bool(options.keep),
    )
    loaders = DataLoader(training, BATCH, shuffle=True), DataLoader(validation, BATCH)
    trainer.fit(Digits(), *loaders, ckpt_path="last" if options.keep else None)

    if trainer.is_global_zero:
        read, ranks = trainer.callback_metrics["read"], trainer.world_size
        print(f"reads {read:.1%} of digits it has not seen, after {trainer.global_step} steps on {ranks} ranks")
        if isinstance(trainer.strategy, AnabranchStrategy):
            print(trainer.strategy.explain())


if __name__ == "__main__":
    main()
