"""Twins: the same model under DDP and under DataParallel, trained side by side and compared after every step."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anabranch import Bucket, DataParallel, Network, Plan, Trace, TuningPolicy

Model = DistributedDataParallel
Train = Callable[[Model, torch.optim.Optimizer, int], object]

WIDTH = 6
# Tries every plan, whatever is predicted and at any price, but no cuts of compiled graphs beside those for the plan.
SHORT = TuningPolicy(
    warmup_steps=2, trial_steps=1, drift_check_steps=2, min_predicted_gain=-1e9, search_share=1e9, cut_share=-1e6
)
# Policies that force each outcome, whatever the measured times are.
SCENARIOS: Mapping[str, TuningPolicy] = {
    "keeps the plan": replace(SHORT, min_gain=-1e9, max_drift=1e9),
    "goes back": replace(SHORT, min_gain=2.0, max_drift=1e9),
    "plans again and again": replace(SHORT, min_gain=-1e9, max_drift=-1e9),  # whatever the noise
    "is given the plan": SHORT,
}
DECISIONS = {"plans again and again": 2}  # number of decisions until training ends; 1 if not named
STEPS_AFTER = 4
STEPS_AT_MOST = 100


def scattered(trace: Trace, network: Network) -> Plan:
    """A plan that no planner would make: shuffled gradients in odd buckets on two lanes, one dtype per bucket."""
    return scatter({tensor.name: tensor.dtype for tensor in trace.tensors})


def scatter(dtypes: Mapping[str, str], lanes: int = 2, seed: int = 3) -> Plan:
    """The same, for these gradients."""
    chance = random.Random(seed)
    parts: list[list[str]] = []
    for dtype in sorted(set(dtypes.values())):
        names = sorted(name for name in dtypes if dtypes[name] == dtype)
        chance.shuffle(names)
        while names:
            size = chance.randint(1, 3)
            parts.append(names[:size])
            names = names[size:]
    chance.shuffle(parts)
    return Plan(tuple(Bucket(tuple(part), i % lanes) for i, part in enumerate(parts)))


def dtypes_of(module: nn.Module) -> dict[str, str]:
    """Name and dtype of all that is trained."""
    return {name: str(p.dtype) for name, p in module.named_parameters() if p.requires_grad}


def plain_train(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """One step, on other data on every rank."""
    optimizer.zero_grad()
    loss = model(batch(step)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def batch(step: int, rows: int = 4) -> torch.Tensor:
    """This rank's inputs of a step."""
    seed = 1000 * step + dist.get_rank()
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def mlp(depth: int = 3) -> nn.Module:
    """Some linear layers."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Feature:
    """Something DDP users rely on: a model, how it is trained, and with which options."""

    build: Callable[[], nn.Module] = mlp
    train: Train = plain_train
    options: Mapping[str, Any] = field(default_factory=dict)
    ours: Mapping[str, Any] = field(default_factory=dict)
    rounding: float = 1e-5  # on more than two ranks, where a sum has another value in another order
    ends_planning: bool = False  # train until it does: a doubtful win, which noise decides, is one decision more


@dataclass(frozen=True)
class Outcome:
    """What one rank saw, as plain values that can leave its process."""

    apart: list[str]
    digest: str
    explained: str
    planned: bool
    layouts: int

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "Outcome":
        """From what ``run`` returned."""
        return cls(**answer)


def run(rank: int, feature: Feature, scenario: str) -> dict[str, Any]:
    """Train the twins through a scenario; names what differed, and hashes the state after every step."""
    theirs, ours = twins(feature, scenario)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5) for model in (theirs, ours)]
    apart: list[str] = []
    digest = sha256()
    layouts: set[str] = set()
    tolerance = 0.0 if dist.get_world_size() == 2 else feature.rounding
    decisions = DECISIONS.get(scenario, 1)
    if feature.ends_planning and decisions > 1:
        decisions = STEPS_AT_MOST
    for step in steps(ours, decisions):
        expected, found = (
            feature.train(model, optimizer, step) for model, optimizer in zip((theirs, ours), optimizers, strict=True)
        )
        apart += [f"step {step} ({stage_of(ours)}): {what}" for what in different(theirs, ours, tolerance)]
        if not close(expected, found, tolerance):
            apart.append(f"step {step} ({stage_of(ours)}): returned {found}, not {expected}")
        layouts.add(ours.plan.fingerprint if ours.plan is not None else "DDP's own")
        for tensor in state(ours).values():
            digest.update(bits(tensor))
    answer = {
        "apart": apart[:10],
        "digest": digest.hexdigest(),
        "explained": ours.explain(),
        "planned": ours.plan is not None,
        "layouts": len(layouts),
    }
    ours.close()
    return answer


def steps(model: DataParallel, decisions: int = 1) -> Iterator[int]:
    """Count steps until the model has made so many decisions, and a few more; or until it no longer plans."""
    made, before, left = 0, "", STEPS_AFTER
    for step in range(STEPS_AT_MOST):
        yield step
        now = stage_of(model)
        made += now != before and "running" in now
        before = now
        if made >= decisions or "no longer" in now or "No plan" in now:
            left -= 1
        if not left:
            return
    raise AssertionError(f"after {STEPS_AT_MOST} steps it is still {before}")


def twins(feature: Feature, scenario: str = "keeps the plan") -> tuple[Model, DataParallel]:
    """DDP and DataParallel around equal modules."""
    torch.manual_seed(7)
    theirs = DistributedDataParallel(feature.build(), **feature.options)
    torch.manual_seed(7)
    module = feature.build()
    ours = dict(feature.ours)
    if scenario == "is given the plan":
        ours.setdefault("plan", scatter(dtypes_of(module)))
    ours = {"planner": scattered, "profile_steps": 2, "network": ring(), "policy": SCENARIOS[scenario], **ours}
    return theirs, DataParallel(module, **feature.options, **ours)


def sgd(model: nn.Module) -> torch.optim.SGD:
    """With momentum, so that a wrong gradient is never forgotten."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def planned(module: nn.Module | None = None, **options: Any) -> DataParallel:
    """A model that has decided for a plan."""
    torch.manual_seed(7)
    model = DataParallel(
        module if module is not None else mlp(),
        planner=scattered,
        network=ring(),
        profile_steps=2,
        policy=SCENARIOS["keeps the plan"],
        **options,
    )
    optimizer = sgd(model)
    for step in steps(model):
        plain_train(model, optimizer, step)
    assert model.plan is not None
    return model


def ring() -> Network:
    """A network for these ranks, so that nothing is measured."""
    return Network.ring(dist.get_world_size(), 1e-5, 1e-9)


def state(model: Model) -> dict[str, torch.Tensor]:
    """Parameters, gradients and buffers by name."""
    parameters = dict(model.module.named_parameters())
    gradients = {f"gradient of {name}": p.grad for name, p in parameters.items() if p.grad is not None}
    tensors = {**parameters, **gradients, **dict(model.module.named_buffers())}
    return {name: tensor.detach().to_dense() for name, tensor in tensors.items()}


def different(theirs: Model, ours: Model, tolerance: float) -> list[str]:
    """The names of what differs between two models."""
    expected, found = state(theirs), state(ours)
    if expected.keys() != found.keys():
        return [f"{name} is in one only" for name in expected.keys() ^ found.keys()]
    return [
        f"{name} is {found[name].flatten()[:3].tolist()}, not {tensor.flatten()[:3].tolist()}"
        for name, tensor in expected.items()
        if not close(tensor, found[name], tolerance)
    ]


def close(expected: object, found: object, tolerance: float) -> bool:
    """Bit-equal without tolerance; NaN equals NaN."""
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return expected == found
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return False
    if tolerance == 0:
        return bits(expected) == bits(found) or torch.equal(expected.nan_to_num(), found.nan_to_num())
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        return torch.equal(expected, found)
    return torch.allclose(expected, found, rtol=tolerance, atol=tolerance, equal_nan=True)


def bits(tensor: torch.Tensor) -> bytes:
    """Its content, byte for byte."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def stage_of(model: DataParallel) -> str:
    """The first line of explain()."""
    return model.explain().splitlines()[0]
