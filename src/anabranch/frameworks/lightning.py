"""Lightning: ``Trainer(strategy="anabranch")`` once this module is imported, or a strategy with arguments.

    from anabranch.frameworks.lightning import AnabranchStrategy

    trainer = Trainer(strategy=AnabranchStrategy(compress="int8"))

For the packages ``lightning`` and ``pytorch_lightning``: where both are installed, for the one that is imported before
this module, else for ``lightning``.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from anabranch.exchange.agreement import from_all_ranks, wire_device
from anabranch.exchange.residuals.momentum import not_shareable
from anabranch.frameworks.comm_state import packed, unpacked
from anabranch.frameworks.wrappers import Wrapper, with_clipping
from anabranch.lean.options import Lean, check_lean
from anabranch.lean.parallel import LeanDataParallel
from anabranch.observe.metrics import CURVES, Metrics
from anabranch.parallel import DataParallel
from anabranch.values.dependencies import require, require_version

WHAT = "anabranch.frameworks.lightning"
TESTED = ("2.4", "2.5", "2.6")  # versions of Lightning
PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}  # what to import from each
NAME = "anabranch"  # names the strategy, and its entry in checkpoints
COMM_HOOK = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper")  # arguments of DDPStrategy
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
    ``DistributedDataParallel`` and of ``DDPStrategy``, by name. With ``memory=Lean()`` the module's optimizer is taken
    over, and gradients are clipped to the Trainer's ``gradient_clip_val``.

    Checkpoints of Lightning hold the residuals of all ranks, where the compression keeps any. The metrics of a step are
    logged as ``anabranch/exposed_s`` and so on, every ``log_every_n_steps`` steps of the Trainer.
    """

    def __init__(self, **options: Any) -> None:
        self._lean: Lean | None = options.pop("memory", None)
        if self._lean is not None:
            check_lean(self._lean)
            if self._lean.optimizer is not None:
                raise ValueError(
                    "AnabranchStrategy was given Lean(optimizer=...), and Lightning has the optimizer of "
                    "configure_optimizers(): leave Lean's optimizer out"
                )
            if hooks := [name for name in COMM_HOOK if options.get(name) is not None]:
                raise ValueError(
                    f"AnabranchStrategy was given {hooks[0]} under Lean, which has no comm hooks: use compress= instead"
                )
        super().__init__(**options)
        self._metrics = _LastMetrics()
        self._group: dist.ProcessGroup | None = None  # the last wrapper's
        self._kept: dict[str, torch.Tensor] = {}  # this rank's state at the end of the last fit()
        self._explanation = "Nothing was trained yet."

    def explain(self) -> str:
        """What ``DataParallel.explain()`` says now, or said at the end of the last fit()."""
        return self.model.explain() if isinstance(self.model, Wrapper) else self._explanation

    # Overridden: wrapping and unwrapping.

    def _setup_model(self, model: nn.Module) -> DataParallel:
        wrapped: DataParallel = DataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)
        self._group = wrapped.process_group
        return wrapped

    def configure_ddp(self) -> None:
        if self._lean is None:
            super().configure_ddp()

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers; under Lean the model is wrapped here, since it takes over its optimizer."""
        super().setup_optimizers(trainer)
        if self._lean is not None:
            lean = replace(_as_trainer_clips(trainer, self._lean), optimizer=self._only_optimizer())
            wrapped = LeanDataParallel(self.lightning_module, memory=lean, **self._ddp_kwargs)
            self._group = wrapped.process_group
            self.model = wrapped
            # Under mixed precision Lightning clips no gradients of an optimizer with this mark. It is for scalers, and
            # those are refused here; Lean's close() restores it.
            wrapped.optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]

    def _only_optimizer(self) -> torch.optim.Optimizer:
        """The module's optimizer; raises ValueError if Lean cannot take it over, or the module trains otherwise."""
        if not self.lightning_module.automatic_optimization:
            raise ValueError(
                "automatic_optimization is False, and under Lean a step is a backward pass behind its forward: use "
                "automatic optimization, or leave memory=Lean(...) out"
            )
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                'precision="16-mixed" under Lean: Lightning calls GradScaler.step(), which needs gradients after '
                'backward, and Lean has freed them; use precision="bf16-mixed"'
            )
        if len(self.optimizers) != 1:
            raise ValueError(f"configure_optimizers() returned {len(self.optimizers)} optimizers: Lean needs one")
        only: torch.optim.Optimizer = self.optimizers[0]
        return only

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        if isinstance(self.model, LeanDataParallel):  # Lightning looks for a DistributedDataParallel
            with self.model.no_sync():
                yield
        else:
            with super().block_backward_sync():
                yield

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if not isinstance(self.model, Wrapper):
            return
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            self.model.follow(scaler)
        if isinstance(self.model, DataParallel):
            for optimizer in self.optimizers:
                if not_shareable(optimizer) is None:  # others must have no momentum in addition
                    self.model.share_momentum(optimizer)
        if self.model.process_group.size() > 1 and not trainer.barebones:  # a barebones Trainer logs nothing
            self.model.log_to(self._metrics)

    def teardown(self) -> None:
        wrapped = self.model if isinstance(self.model, Wrapper) else None
        self._kept = {}
        if wrapped is not None and not self.lightning_module.trainer.interrupted:
            self._kept = {name: part.cpu() for name, part in _entries(wrapped).items()}
            self._explanation = wrapped.explain()
        if isinstance(wrapped, LeanDataParallel):
            self.model = self.lightning_module
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
        entries = _entries(self.model) if isinstance(self.model, Wrapper) else self._kept
        if entries and self._group is not None and "optimizer_states" in checkpoint:  # not one of weights only
            states = _gathered(entries, self._group)
            if self.is_global_zero:
                checkpoint[NAME] = states
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if NAME in checkpoint and isinstance(self.model, Wrapper):
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


def _as_trainer_clips(trainer: Any, lean: Lean) -> Lean:
    """Lean with the Trainer's ``gradient_clip_val``: by the norm, or by value where its algorithm says so."""
    limit, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    if not limit:
        return lean
    by_value = algorithm is not None and algorithm.value == "value"
    name: Literal["clip_norm", "clip_value"] = "clip_value" if by_value else "clip_norm"
    return with_clipping(lean, name, float(limit), "Trainer gradient_clip_val")


def _entries(model: Wrapper) -> dict[str, torch.Tensor]:
    """This rank's communication state as tensors by name; empty if none is kept."""
    state = model.comm_state_dict()
    return dict(packed(state)) if state else {}


def _gathered(entries: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> list[dict[str, torch.Tensor]]:
    """The entries of every rank, in rank order and in host memory, on rank 0; an empty list elsewhere. Collective.

    Lightning's checkpoint is one file, which rank 0 writes. Names and shapes may differ between ranks. Tensors travel
    one by one, so that a GPU holds one more of them at most.
    """
    device, rank = wire_device(group), dist.get_rank(group)
    shapes = [[name, str(part.dtype).removeprefix("torch."), list(part.shape)] for name, part in entries.items()]
    headers = from_all_ranks(json.dumps(shapes).encode(), group)
    if rank != 0:
        for part in entries.values():
            dist.send(part.to(device).contiguous(), group_dst=0, group=group)
        return []
    states = [{name: part.cpu() for name, part in entries.items()}]
    for source, header in enumerate(headers[1:], start=1):
        states.append({})
        for name, dtype, shape in json.loads(header):
            part = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            dist.recv(part, group_src=source, group=group)
            states[source][name] = part.cpu()
    return states


_strategies.StrategyRegistry.register(
    NAME, AnabranchStrategy, description="DataParallel of anabranch in place of DDP", override=True
)
