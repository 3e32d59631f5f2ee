"""Training: one rank's model, optimizer and steps, with the points at which a fault may strike."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import anabranch as ab
from anabranch.values.kinds.names import COMPRESSED, two_level
from parallel.models import Branches
from parallel.twins import SCENARIOS, WIDTH, bits, dtypes_of, mlp, scatter, scattered
from soak.configurations import Configuration

At = Callable[[str, int], object]  # (point, step): strikes if the fault is due
BRANCHES = ((0, 1), (1, 2), (0, 2, 3), (3,))
WIDE, WIDE_LAYERS = 160, 5  # a layer has 100 KiB, more than the least that is cut off a compiled graph
WEIGHTS_AT_MOST = 4000  # that are written down
POLICY = SCENARIOS["plans again and again"]


def nothing(module: nn.Module) -> None:
    """Leave the module as it was built."""


class Training:
    """One rank's training under DataParallel, or, as control, under stock DDP."""

    def __init__(
        self, configuration: Configuration, at: At, control: bool, change: Callable[[nn.Module], None] = nothing
    ) -> None:
        self.configuration = configuration
        self.control = control
        self.step = 0
        self.skips_nonfinite = False
        self.skips_backward = False
        self.out_of_inputs = False
        self._at = at
        self.module = build(configuration)
        change(self.module)
        if not configuration.compiled:  # a hook would cut the graph of a compiled model
            middle = [part for part in self.module.modules() if isinstance(part, nn.Linear)][1]
            # Lean's engine holds the module until the wrapper is freed, so its hooks must not hold the wrapper.
            inside = weakref.WeakMethod(self._inside)
            middle.register_forward_hook(lambda *given: own(*given) if (own := inside()) is not None else None)
        self.model = self._wrap()
        compiled = configuration.compiled and not control
        self.call = torch.compile(self.model, backend=configuration.compiled) if compiled else self.model
        lean = configuration.lean is not None and not control
        self.optimizer = self.model.optimizer if lean else self._optimizer(self.module.parameters())
        if isinstance(self.model, ab.DataParallel) and not lean:
            self.model.share_momentum(self.optimizer)  # which changes nothing without OkTopk(momentum=...)

    def _wrap(self) -> Any:
        own = self.configuration
        if self.control:
            return DistributedDataParallel(self.module, **own.ddp)
        memory = ab.Lean(_lean_optimizer(weakref.ref(self)), **own.lean) if own.lean is not None else None
        return ab.DataParallel(self.module, **own.ddp, **arguments(own, self.module), memory=memory)

    def _optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self.configuration.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=0.01)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)

    def _inside(self, _module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        self.strike("forward")
        output.register_hook(self._backward)

    def _backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        factor = self.strike("backward")
        return gradient * factor if isinstance(factor, float) else None

    def strike(self, point: str) -> object:
        """Let the fault happen if it is due at this point of this step; what its action returned."""
        return self._at(point, self.step)

    def stage(self) -> str:
        """The first line of explain(); of stock DDP, nothing."""
        return str(self.model.explain()).splitlines()[0].removeprefix("anabranch: ") if not self.control else ""

    def in_force(self) -> str:
        """The plan or the cached choice in force, in words; empty under DDP's own buckets."""
        if self.control or self.configuration.build == "sharded":
            return ""
        stage = self.stage()
        return f"under a plan, {stage}" if self.model.plan is not None else stage if "as cached on" in stage else ""

    def ddp_sends_in_backward(self) -> bool:
        """Whether DDP itself sends in backward now, where no words of ours can be added to Gloo's.

        It sends its own buckets, which run inside join(), too; and beside a plan's, which parameters were unused.
        """
        if not isinstance(self.model, DistributedDataParallel):  # Lean's, or a sharded one
            return False
        tuner = getattr(self.model, "_tuner", None)
        under_plan = tuner is not None and tuner.runner.plan_in_force is not None
        return self.model.find_unused_parameters or not under_plan

    def inputs(self) -> tuple[Any, ...]:
        """This rank's inputs of the step."""
        generator = torch.Generator().manual_seed(1000 * self.step + dist.get_rank())
        width = WIDE if self.configuration.build == "wide" else WIDTH
        rows = torch.randn(self.configuration.rows, width, generator=generator)
        return (rows, BRANCHES[self.step % len(BRANCHES)]) if self.configuration.style == "branches" else (rows,)

    def steps(self, first: int, count: int) -> Iterator[int]:
        """Train from step ``first`` on, ``count`` steps in all; yields the number of each step that was made."""
        with self.model.join() if self.configuration.style == "join" else nullcontext():
            for self.step in range(first, first + count):
                self.strike("data")
                if self.out_of_inputs:
                    return
                self._one_step()
                self.strike("after")
                yield self.step

    def _one_step(self) -> None:
        self.optimizer.zero_grad()
        if self.configuration.style == "accumulate":
            with self.model.no_sync():
                self._pass()
        self._pass()
        if self.configuration.lean is None or self.control:
            self.strike("update")
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        if not self.skips_nonfinite or all(bool(g.isfinite().all()) for g in gradients):
            self.optimizer.step()

    def _pass(self) -> None:
        output = self.call(*self.inputs())
        if self.configuration.compiled:
            self._inside(self.module, (), output)
        loss = output.square().mean()
        self.strike("loss")
        if self.skips_backward:
            self.skips_backward = False
        else:
            loss.backward()

    def weights(self) -> list[float]:
        """All parameters that this rank has, one after the other; of a large model, some."""
        values = torch.cat([_local(p).double().flatten() for p in self.module.parameters()])
        found: list[float] = values[:: 1 + len(values) // WEIGHTS_AT_MOST].tolist()
        return found

    def digest(self) -> str:
        """A hash of all parameters that this rank has, bit by bit."""
        return sha256(b"".join(bits(_local(parameter)) for parameter in self.module.parameters())).hexdigest()[:16]

    @property
    def part(self) -> int:
        """Ranks with the same number have the same part of the model."""
        return 0

    def close(self) -> None:
        """Close the wrapper, which stock DDP cannot."""
        if not self.control:
            self.model.close()


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """The part of a parameter that this rank has."""
    whole = parameter.detach()
    return whole.to_local() if isinstance(whole, DTensor) else whole


def _lean_optimizer(training: "weakref.ref[Training]") -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """What Lean makes its optimizers with. Lean holds it, so it must not hold the model: nothing would be freed."""

    def strike(*_: object) -> None:
        if (own := training()) is not None:
            own.strike("update")

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        own = training()
        assert own is not None
        optimizer = own._optimizer(parameters)
        optimizer.register_step_pre_hook(strike)
        return optimizer

    return make


def build(configuration: Configuration) -> nn.Module:
    """The model, with its initial weights."""
    torch.manual_seed(configuration.seed)
    if configuration.build == "branches":
        return Branches()
    if configuration.build == "normed":
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), mlp(1))
    if configuration.build == "wide":
        return nn.Sequential(*(part for _ in range(WIDE_LAYERS) for part in (nn.Linear(WIDE, WIDE), nn.Tanh())))
    return mlp(4)


def arguments(configuration: Configuration, module: nn.Module) -> dict[str, Any]:
    """The arguments of DataParallel: short trials, whose plans are kept, and dropped again, whatever was measured."""
    found: dict[str, Any] = {"profile_steps": 2, "policy": POLICY, **configuration.ours}
    if found.get("planner") == "scattered":
        found["planner"] = scattered
    if configuration.given_plan:
        found["plan"] = given_plan(configuration, module)
    if not configuration.measured:
        found["network"] = network(found.get("compress"))
    return found


def network(compress: object) -> ab.Network:
    """A network of these ranks, so that nothing is measured; with the costs of the compression's collective."""
    curves = {"dense": [(1024, 1e-4, 1e-6), (1 << 20, 1e-2, 1e-4)]}
    if isinstance(compress, ab.OkTopk):
        curves[f"oktopk:{compress.density:g}"] = [(1024, 5e-5, 1e-6), (1 << 20, 5e-3, 1e-4)]
    if isinstance(compress, str):
        curves |= dict.fromkeys(COMPRESSED, curves["dense"])
    return ab.Network.measured(dist.get_world_size(), curves)


def given_plan(configuration: Configuration, module: nn.Module) -> ab.Plan:
    """A plan that no planner would make, sent by the configuration's compression."""
    compress = configuration.ours.get("compress")
    kind = f"oktopk:{compress.density:g}" if isinstance(compress, ab.OkTopk) else compress or "dense"
    kind = "int4" if kind == "auto" else kind  # one that auto may choose
    plan = scatter(dtypes_of(module))
    kinds = [str(kind), two_level(str(kind)) if "nodes" in configuration.ours else str(kind)]
    return ab.Plan(tuple(replace(bucket, collective=kinds[i % 2]) for i, bucket in enumerate(plan.buckets)))
