"""Lightning: ``Trainer(strategy="anabranch")`` once this module is imported, or a strategy with arguments.

    from anabranch.integrations.lightning import AnabranchStrategy

    trainer = Trainer(strategy=AnabranchStrategy(compress="int8"))

For the packages ``lightning`` and ``pytorch_lightning``: where both are installed, for the one that is imported before
this module, else for ``lightning``.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from anabranch.extras import require, require_version
from anabranch.integrations.distributed_checkpoint import packed, unpacked
from anabranch.integrations.gathering import gathered
from anabranch.observe.loggers import CURVES
from anabranch.observe.metrics import Metrics
from anabranch.parallel import DataParallel

WHAT = "anabranch.integrations.lightning"
TESTED = ("2.4", "2.5", "2.6")  # versions of Lightning
PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}  # what to import from each
NAME = "anabranch"  # of the strategy, and of the entry in checkpoints
ON_PROGRESS_BAR = "exposed_s"


def _package() -> str:
    """The Lightning package of this program; raises MissingExtraError if there is none, or another version."""
    imported = [package for package, module in PACKAGES.items() if sys.modules.get(module) is not None]
    installed = [package for package in PACKAGES if find_spec(package) is not None]
    package = next(iter([*imported, *installed]), "lightning")
    require(package, "test-frameworks", WHAT)
    require_version(package, import_module(PACKAGES[package]).__version__, TESTED, WHAT)
    return PACKAGES[package]


_strategies: Any = import_module(f"{_package()}.strategies")


class AnabranchStrategy(_strategies.DDPStrategy):  # type: ignore[misc]
    """Lightning's ``DDPStrategy`` with a ``DataParallel`` in place of the ``DistributedDataParallel``.

    Takes the arguments of ``DataParallel`` (``compress``, ``planner``, ``plan``, ``policy``, ``cache``, …), of
    ``DistributedDataParallel`` and of ``DDPStrategy``, by name. ``memory=Lean(...)`` is refused.

    Checkpoints of Lightning hold the residuals of all ranks, where the compression keeps any. The metrics of a step are
    logged as ``anabranch/exposed_s`` and so on, every ``log_every_n_steps`` steps of the Trainer.
    """

    def __init__(self, **options: Any) -> None:
        if options.get("memory") is not None:
            raise ValueError(
                "AnabranchStrategy was given memory=Lean(...), which updates parameters in backward, while Lightning "
                "updates them in optimizer.step(): leave memory out, or write the training loop yourself"
            )
        super().__init__(**options)
        self._metrics = _LastMetrics()
        self._group: dist.ProcessGroup | None = None  # of the last wrapper
        self._kept: dict[str, torch.Tensor] = {}  # this rank's state at the end of the last fit()
        self._explanation = "Nothing was trained yet."

    def explain(self) -> str:
        """What ``DataParallel.explain()`` says now, or said at the end of the last fit()."""
        return self.model.explain() if isinstance(self.model, DataParallel) else self._explanation

    # Overridden: wrapping and unwrapping.

    def _setup_model(self, model: nn.Module) -> DataParallel:
        wrapped: DataParallel = DataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)
        self._group = wrapped.process_group
        return wrapped

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if not isinstance(self.model, DataParallel):
            return
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            self.model.follow(scaler)
        if self.model.process_group.size() > 1 and not trainer.barebones:  # a barebones Trainer logs nothing
            self.model.log_to(self._metrics)

    def teardown(self) -> None:
        wrapped = self.model if isinstance(self.model, DataParallel) else None
        self._kept = {}
        if wrapped is not None and not self.lightning_module.trainer.interrupted:
            self._kept = {name: part.cpu() for name, part in _entries(wrapped).items()}
            self._explanation = wrapped.explain()
        super().teardown()
        if wrapped is not None:
            wrapped.close()

    # Overridden: steps.

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        trainer, metrics = self.lightning_module.trainer, self._metrics.last
        # Logged in time for the Trainer's own turn, and not in every step, since every value costs a copy to the GPU.
        every = trainer.log_every_n_steps
        if metrics is not None and every and (trainer.global_step + 1) % every == 0:
            for name in CURVES:
                if (value := getattr(metrics, name)) is not None:
                    self.lightning_module.log(
                        f"{NAME}/{name}", float(value), prog_bar=name == ON_PROGRESS_BAR, rank_zero_only=True
                    )
        return output

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        super().pre_backward(closure_loss)
        if isinstance(self.model, DataParallel) and not self.lightning_module.automatic_optimization:
            self.model._after_forward(closure_loss)  # manual_backward() is called inside forward, before its end

    # Overridden: checkpoints. Lightning calls these on every rank.

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        entries = _entries(self.model) if isinstance(self.model, DataParallel) else self._kept
        if entries and self._group is not None and "optimizer_states" in checkpoint:  # not one of weights only
            states = gathered(entries, self._group)
            if self.is_global_zero:
                checkpoint[NAME] = states
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if NAME in checkpoint and isinstance(self.model, DataParallel):
            states = [unpacked(entries, f"{NAME}/rank{rank}") for rank, entries in enumerate(checkpoint[NAME])]
            group = self.model.process_group
            self.model.load_comm_state_dict(*([states[group.rank()]] if len(states) == group.size() else states))


class _LastMetrics:
    """A logger that keeps the metrics of the last step."""

    last: Metrics | None = None

    def log(self, metrics: Metrics) -> None:
        self.last = metrics

    def close(self) -> None:
        self.last = None


def _entries(model: DataParallel) -> dict[str, torch.Tensor]:
    """This rank's communication state as tensors by name; empty if none is kept."""
    state = model.comm_state_dict()
    return dict(packed(state)) if state else {}


_strategies.StrategyRegistry.register(
    NAME, AnabranchStrategy, description="DataParallel of anabranch in place of DDP", override=True
)
