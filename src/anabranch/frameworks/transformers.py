"""Transformers' Trainer with anabranch: one line between ``Trainer(...)`` and ``train()``.

    trainer = Trainer(model, arguments, train_dataset=...)
    use_anabranch(trainer, compress="int8")  # the added line
    trainer.train()

A Trainer gives callbacks neither itself nor its Accelerator, so this is a function that takes the Trainer.
"""

from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anabranch.frameworks import accelerate
from anabranch.frameworks.comm_state import load_rank_files, save_rank_file
from anabranch.frameworks.wrappers import Wrapper, with_clipping
from anabranch.lean.options import Lean
from anabranch.lean.parallel import LeanDataParallel
from anabranch.observe.metrics import Metrics
from anabranch.values.dependencies import check_signatures

if TYPE_CHECKING:
    from transformers import Trainer

TESTED = "5.22.2"
SIGNATURES = {
    "create_accelerator_and_postprocess": (),
    "create_optimizer": (),
    "log": ("logs",),
    "_save_optimizer_and_scheduler": ("output_dir",),
    "_load_optimizer_and_scheduler": ("checkpoint",),
}
LOGGED = ("measured_s", "predicted_s", "exposed_s", "overlap", "sent_nbytes", "density")


def use_anabranch(trainer: "Trainer", **options: Any) -> None:
    """Have this Trainer wrap its model in ``DataParallel(model, **options)``; call it before ``train()``.

    Checkpoints then hold every rank's ``comm_state_dict()``, and what the Trainer logs holds the means of
    ``Metrics`` since it logged last, on rank 0: ``anabranch/exposed_s``, ``anabranch/sent_nbytes``,
    ``anabranch/density`` and more. With ``memory=Lean()`` the Trainer's optimizer is taken over, and gradients are
    clipped to its ``max_grad_norm``.
    """
    check_signatures("transformers", TESTED, trainer, SIGNATURES)
    if isinstance(getattr(trainer.log, "__self__", None), AnabranchTraining):
        raise ValueError("use_anabranch() was called twice with this Trainer: call it once, with all options")
    _check_settings(trainer, options)
    if (lean := options.get("memory")) is not None:
        options["memory"] = _as_trainer_clips(trainer, lean)
    AnabranchTraining(trainer, options)


def _check_settings(trainer: "Trainer", options: dict[str, Any]) -> None:
    """Raise ValueError if this Trainer cannot train with these options."""
    if isinstance(trainer.model, Wrapper | nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"the Trainer's model is a {type(trainer.model).__name__}: give Trainer the model itself, and "
            "use_anabranch(trainer, ...) the arguments of DataParallel"
        )
    if options.get("memory") is not None and getattr(trainer.args, "auto_find_batch_size", False):
        raise ValueError(
            "auto_find_batch_size=True under Lean: a step that runs out of memory has updated some buckets already; "
            "choose per_device_train_batch_size, such as with anabranch memory"
        )


def _as_trainer_clips(trainer: "Trainer", lean: Lean) -> Lean:
    """Lean with the Trainer's ``max_grad_norm``; without one the norm is only computed, for the Trainer's logs."""
    max_norm = trainer.args.max_grad_norm
    if max_norm and max_norm > 0:
        return with_clipping(lean, "clip_norm", max_norm, "TrainingArguments max_grad_norm")
    return lean if lean.clip_norm is not None else replace(lean, clip_norm=inf)


class AnabranchTraining:
    """What ``use_anabranch`` adds to one Trainer: methods in place of the Trainer's, which they call."""

    def __init__(self, trainer: "Trainer", options: dict[str, Any]) -> None:
        self._trainer = trainer
        self._options = options
        self._means = MeansSinceLog()
        self._stock = {name: getattr(trainer, name) for name in SIGNATURES}
        self._use_accelerator()
        for name in SIGNATURES:
            setattr(trainer, name, getattr(self, name))

    def create_accelerator_and_postprocess(self) -> None:
        """Make an Accelerator, as each trial of a search for hyperparameters does, and have it use anabranch."""
        self._stock["create_accelerator_and_postprocess"]()
        self._use_accelerator()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """The Trainer's optimizer; under Lean the model's own or this taken over, so the model is wrapped here."""
        trainer, lean = self._trainer, self._options.get("memory")
        is_new = self._wrappers.of(trainer.model) is None  # else train() is called once more
        if is_new:
            trainer.model_wrapped = trainer.model  # evaluate() before train() leaves it compiled, but not wrapped
        if lean is None or (is_new and lean.optimizer is None):
            made: torch.optim.Optimizer = self._stock["create_optimizer"](*args, **kwargs)
            if lean is None:
                return made
            self._wrappers.options["memory"] = replace(lean, optimizer=made)
        if is_new:
            trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model)
        if isinstance(wrapper := trainer.model_wrapped, LeanDataParallel):
            trainer.optimizer = wrapper.optimizer
        elif lean.optimizer is not None:  # with one process nothing is wrapped
            self._stock["create_optimizer"](*args, **kwargs)
        used: torch.optim.Optimizer = trainer.optimizer
        return used

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log with the means of the steps since the last log, if these are the logs of steps."""
        if "loss" in logs:
            logs.update(self._means.taken())
        self._stock["log"](logs, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._stock["_save_optimizer_and_scheduler"](output_dir)
        if (wrapper := self._wrappers.of(self._trainer.model)) is not None:
            save_rank_file(wrapper, output_dir)
            # Afterwards the Trainer deletes older checkpoints: not before this one has the files of all ranks.
            self._trainer.accelerator.wait_for_everyone()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self._stock["_load_optimizer_and_scheduler"](checkpoint)
        wrapper = self._wrappers.of(self._trainer.model)
        if checkpoint is not None and wrapper is not None:
            load_rank_files(wrapper, checkpoint)

    def _use_accelerator(self) -> None:
        self._wrappers = accelerate.use_anabranch(self._trainer.accelerator, **self._options)
        self._wrappers.on_wrap = lambda wrapper: wrapper.log_to(self._means)


@dataclass
class MeansSinceLog:
    """A logger that keeps the metrics of steps until their means are taken."""

    _steps: list[Metrics] = field(default_factory=list)

    def log(self, metrics: Metrics) -> None:
        self._steps.append(metrics)

    def close(self) -> None:
        self._steps.clear()

    def taken(self) -> dict[str, float]:
        """The mean of each value that is known, by the name it is logged under; then forgets the steps."""
        known = {name: [value for step in self._steps if (value := getattr(step, name)) is not None] for name in LOGGED}
        self._steps.clear()
        return {f"anabranch/{name}": sum(values) / len(values) for name, values in known.items() if values}
