"""What DDP users rely on, compiled, beside a DDP; graphs are cut at every layer that has gradients."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch._dynamo
from torch import nn

from anabranch.ddp.compiled import cut_points as cuts
from ddp.compiled.models import Log
from parallel.test_features import FEATURES
from parallel.twins import Model, different, sgd, steps, twins
from ranks import on_ranks

NOT_COMPILED = {"gradient penalty"}  # torch cannot differentiate a compiled backward once more
NAMES = [name for name in FEATURES if name not in NOT_COMPILED]
GROUPS = 4  # of features that share their ranks' processes
ROUNDING = 1e-5
# Inductor keeps sums of bfloat16 and float16 in float32 where it fuses operations: a compiled DDP is 3e-4 away from an
# eager one after these steps, too. So here they are compared with a compiled DDP.
FUSED = {"autocast", "GradScaler"}
UNPLANNED = "frozen on the way"


def built(name: str) -> nn.Module:
    """The feature's model; torch does not compile the forward of a class of its own, so that is given another."""
    module = FEATURES[name].build()
    kind: Any = type(module)
    if kind.forward.__module__.startswith("torch."):

        class Ours(kind):  # type: ignore[misc]
            def forward(self, x: torch.Tensor) -> Any:
                return super().forward(x)

        module.__class__ = Ours
    return module


def follow(rank: int, names: list[str], scenario: str, backend: str) -> list[dict[str, Any]]:
    """Train each of these features through a scenario; what differed from DDP, and the steps of compiling."""
    warnings.simplefilter("ignore")  # torch's own, in its compiler
    torch._functorch.config.donated_buffer = False  # for "two losses": inductor refuses retain_graph otherwise
    cuts.MIN_PART_NBYTES = 1
    found = []
    for name in names:
        torch._dynamo.reset()
        feature = replace(FEATURES[name], build=partial(built, name))
        theirs, ours = twins(feature, scenario)
        log = Log(name=backend)
        called = cast(Model, torch.compile(ours, backend=log))
        reference = theirs
        if backend == "inductor" and name in FUSED:
            reference = cast(Model, torch.compile(theirs, backend=Log(name=backend)))
        optimizers = [sgd(theirs), sgd(ours)]
        apart: list[str] = []
        for step in steps(ours):
            log.step = step
            for model, optimizer in zip((reference, called), optimizers, strict=True):
                feature.train(model, optimizer, step)
            apart += [f"step {step}: {what}" for what in different(theirs, ours, max(ROUNDING, feature.rounding))]
        found.append({"apart": apart[:3], "compiled": log.compiled, "explained": ours.explain()})
        ours.close()
    return found


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("scenario", "backend"),
    [("keeps the plan", "aot_eager"), ("is given the plan", "aot_eager"), ("keeps the plan", "inductor")],
)
@pytest.mark.parametrize("group", range(GROUPS))
def test_equals_ddp_to_rounding(group: int, scenario: str, backend: str) -> None:
    names = NAMES[group::GROUPS]
    for answers in on_ranks(follow, 2, names, scenario, backend, timeout_s=100):
        for name, answer in zip(names, answers, strict=True):
            assert answer["apart"] == [], f"{name}: {answer['explained']}"
            assert answer["compiled"], f"{name}: nothing was compiled"
            assert name == UNPLANNED or "predicted" in answer["explained"], f"{name}: {answer['explained']}"
