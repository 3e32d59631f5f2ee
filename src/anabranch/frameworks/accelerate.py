"""Accelerate with anabranch: ``prepare()`` makes a DataParallel where it would have made a DistributedDataParallel.

    accelerator = Accelerator()
    use_anabranch(accelerator, compress="int8")  # the added line
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Everything else of the Accelerator stays as it is, since a DataParallel is a DistributedDataParallel. A
LeanDataParallel is none: it is unwrapped here, and what it cannot do is refused.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anabranch.exchange.residuals.momentum import not_shareable
from anabranch.frameworks.comm_state import load_rank_files, save_rank_file
from anabranch.frameworks.wrappers import Wrapper
from anabranch.lean.parallel import LeanDataParallel
from anabranch.parallel import DataParallel
from anabranch.values.dependencies import check_signatures, unsupported

if TYPE_CHECKING:
    from accelerate import Accelerator

TESTED = "1.15.0"
SIGNATURES = {
    "prepare_model": ("model", "device_placement", "evaluation_mode"),
    "prepare_optimizer": ("optimizer", "device_placement"),
    "unwrap_model": ("model",),
    "register_save_state_pre_hook": ("hook",),
    "register_load_state_pre_hook": ("hook",),
}
PREPARED = "_is_accelerate_prepared"  # the mark on models that Accelerate leaves as they are
REPLACED = ("NO", "MULTI_CPU", "MULTI_GPU")  # types of distributed training with DDP, or with one process and nothing


def use_anabranch(accelerator: "Accelerator", **options: Any) -> "Wrappers":
    """Have this Accelerator wrap models in ``DataParallel(model, **options)`` from now on.

    Call it before ``prepare()``, on every rank. ``options`` are arguments of ``DataParallel``; arguments of
    DistributedDataParallel also come from Accelerate's ``DistributedDataParallelKwargs``. ``save_state()`` and
    ``load_state()`` then include every rank's ``comm_state_dict()``. A model that is already a DataParallel is not
    wrapped again. Returns the wrappers, by model.
    """
    check_signatures("accelerate", TESTED, accelerator, SIGNATURES)
    if isinstance(getattr(accelerator.prepare_model, "__self__", None), Wrappers):
        raise ValueError("use_anabranch() was called twice with this Accelerator: call it once, with all options")
    if not isinstance(getattr(accelerator, "_models", None), list):
        raise unsupported("accelerate", TESTED, "Accelerator has no list _models")
    # Accelerate marks a model that it has prepared for evaluation, and for training the wrapper around it.
    if accelerator.num_processes > 1 and any(not hasattr(model, PREPARED) for model in accelerator._models):
        raise ValueError(
            "use_anabranch() was called after prepare(), or train() of a Trainer: a model is in a "
            "DistributedDataParallel already; call it before"
        )
    kind = getattr(accelerator.distributed_type, "name", str(accelerator.distributed_type))
    if kind not in REPLACED:
        raise ValueError(
            f"the Accelerator's distributed_type is {kind}: expected {' or '.join(REPLACED)}, since anabranch takes "
            "the place of DistributedDataParallel only; leave use_anabranch() out"
        )
    return Wrappers(accelerator, options)


class Wrappers:
    """The wrappers of one Accelerator's models: makes them, and saves and loads what they keep between steps.

    ``options`` are the arguments of the next DataParallel.
    """

    def __init__(self, accelerator: "Accelerator", options: dict[str, Any]) -> None:
        self._accelerator = accelerator
        self.options = options
        self._made: WeakValueDictionary[int, Wrapper] = WeakValueDictionary()  # by id of the module inside
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()  # prepared ones that can share momentum
        self.on_wrap: Callable[[Wrapper], None] | None = None  # called with each new wrapper
        self._stock = {name: getattr(accelerator, name) for name in SIGNATURES}
        for name in SIGNATURES:
            if not name.startswith("register_"):
                setattr(accelerator, name, getattr(self, name))
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)

    def of(self, module: nn.Module) -> Wrapper | None:
        """The wrapper around this module; None if there is none."""
        return self._made.get(id(module))

    # In place of the Accelerator's methods of these names.

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The model, prepared by Accelerate and wrapped by anabranch."""
        stock = self._stock["prepare_model"]
        if isinstance(model, Wrapper):
            return self._prepare_wrapped(model)
        if not evaluation_mode:
            self._forget_evaluation(model)
        with _instead_of_ddp(self._wrap):
            prepared: nn.Module = stock(model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        inner = getattr(prepared, "_orig_mod", prepared)  # torch.compile() comes last
        if isinstance(inner, DistributedDataParallel) and not isinstance(inner, Wrapper):
            raise unsupported("accelerate", TESTED, "prepare_model() makes a DistributedDataParallel of its own")
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """The optimizer, prepared by Accelerate; under Lean only the model's own."""
        leans = [wrapper for wrapper in self._made.values() if isinstance(wrapper, LeanDataParallel)]
        of_lean = any(_trains(optimizer, lean) for lean in leans)
        known = (getattr(optimizer, "optimizer", optimizer), optimizer)  # one that was prepared before has ours inside
        memory = self.options.get("memory")
        ours = [*(lean.optimizer for lean in leans), *([] if memory is None else [memory.optimizer])]
        if (memory is not None or of_lean) and not any(one in known for one in ours):
            raise ValueError(
                f"prepare() was given a {type(optimizer).__name__}, and under Lean every bucket is updated in "
                "backward, by the optimizer of Lean(optimizer=...): give that this optimizer, or a function; then "
                "prepare the model first, and model.optimizer"
            )
        prepared = self._stock["prepare_optimizer"](optimizer, device_placement=device_placement)
        own = getattr(prepared, "optimizer", prepared)
        # Others must have no momentum in addition to OkTopk's.
        if not_shareable(own) is None and own not in self._optimizers:
            self._optimizers.add(own)
            for wrapper in self._made.values():
                _share_momentum(wrapper, own)
        return prepared

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The user's model without wrappers."""
        unwrapped: nn.Module = self._stock["unwrap_model"](
            model.module if isinstance(model, LeanDataParallel) else model, *args, **kwargs
        )
        return unwrapped

    # Wrappers.

    def _wrap(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, **of_ddp: Any) -> Wrapper:
        """Called by Accelerate in place of DDP's constructor, with its arguments."""
        if (old := self.of(module)) is not None:  # the module is prepared again, such as for another batch size
            old.close()
        hook: Any = getattr(self._accelerator.ddp_handler, "comm_hook", None)
        if self.options.get("memory") is not None and getattr(hook, "name", "NO") != "NO":
            raise ValueError(
                f"DistributedDataParallelKwargs has comm_hook={hook.name} under Lean, which has no comm hooks: use "
                f'compress= of DataParallel, such as "bf16"'
            )
        if self.options.get("memory") is None:  # Lean takes neither
            of_ddp |= {"device_ids": device_ids, "output_device": output_device}
        return self._take(DataParallel(module, **{**of_ddp, **self.options}))

    def _forget_evaluation(self, model: nn.Module) -> None:
        """Have a model prepared again that was prepared for evaluation only.

        Accelerate returns such a model as it is: it would train without averaging, and ranks would drift apart.
        """
        wrapped = isinstance(getattr(model, "_orig_mod", model), Wrapper) or self.of(model) is not None
        if wrapped or self._accelerator.num_processes == 1 or not getattr(model, PREPARED, False):
            return
        setattr(model, PREPARED, False)
        if "_original_forward" in vars(model):
            model.forward = vars(model).pop("_original_forward")  # without autocast, which is added once more
        self._accelerator._models = [one for one in self._accelerator._models if one is not model]

    def _prepare_wrapped(self, wrapper: Wrapper) -> Wrapper:
        """Prepare a model that is wrapped already: autocast, but no second wrapper, and no other device."""
        module = wrapper.module
        if self.of(module) is wrapper:
            return wrapper
        prepared = self._stock["prepare_model"](module, device_placement=False, evaluation_mode=True)
        if prepared is not module:
            raise ValueError(
                f"Accelerate's torch.compile() cannot reach the {type(module).__name__} inside a DataParallel: leave "
                "wrapping to prepare(), or compile the model before you wrap it and not in Accelerate"
            )
        return self._take(wrapper)

    def _take(self, wrapper: Wrapper) -> Wrapper:
        scaler = self._accelerator.scaler
        if scaler is not None and isinstance(wrapper, LeanDataParallel):
            raise ValueError(
                "mixed_precision='fp16' under Lean: Accelerate's optimizer calls GradScaler.step(), which needs "
                "gradients after backward, and Lean has freed them; use mixed_precision='bf16'"
            )
        if scaler is not None:
            wrapper.follow(scaler)
        self._made[id(wrapper.module)] = wrapper
        for optimizer in self._optimizers:
            _share_momentum(wrapper, optimizer)
        if self.on_wrap is not None:
            self.on_wrap(wrapper)
        return wrapper

    # Checkpoints. Accelerate's list of models holds the modules inside.

    def _save(self, modules: list[nn.Module], _weights: Any, folder: str | os.PathLike[str]) -> None:
        for wrapper, name in self._named(modules):
            save_rank_file(wrapper, folder, name)

    def _load(self, modules: list[nn.Module], folder: str | os.PathLike[str]) -> None:
        for wrapper, name in self._named(modules):
            load_rank_files(wrapper, folder, name)

    def _named(self, modules: list[nn.Module]) -> Iterator[tuple[Wrapper, str]]:
        for index, module in enumerate(modules):
            if (wrapper := self.of(module)) is not None:
                yield wrapper, f"anabranch_{index}" if index else "anabranch"


def _trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether the optimizer has a parameter of this model."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(parameter) in held for parameter in model.parameters())


def _share_momentum(wrapper: Wrapper, optimizer: torch.optim.Optimizer) -> None:
    """If the optimizer trains this model. Either may be prepared first."""
    if isinstance(wrapper, DataParallel) and _trains(optimizer, wrapper):
        wrapper.share_momentum(optimizer)


@contextmanager
def _instead_of_ddp(wrap: Callable[..., Wrapper]) -> Iterator[None]:
    """A context in which ``torch.nn.parallel.DistributedDataParallel(...)`` calls ``wrap(...)``.

    prepare_model() looks that name up when it wraps, and takes no class as an argument; everything that it does before
    and after, such as autocast and torch.compile, stays its own.
    """

    class InsteadOfDDP(DistributedDataParallel):  # a class, since a function would break isinstance()
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return wrap(*args, **kwargs)

    torch.nn.parallel.DistributedDataParallel = InsteadOfDDP  # type: ignore[misc]
    try:
        yield
    finally:
        torch.nn.parallel.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]
