"""What one rank sees of a training, as a list that can be compared: results, tensors by name, and how it ended."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from parallel.twins import Feature, Model, close, plain_train, sgd, state

STEPS = 12  # enough for an eager DataParallel to try its plan and to keep it

Wrap = Callable[..., Model]
Observe = Callable[[Wrap], list[Any]]  # a behaviour: what a rank sees under this wrapper


def trained(
    wrap: Wrap, feature: Feature, prepare: Callable[[Model], object] = lambda _: None, steps: int = STEPS
) -> list[Any]:
    """The results of each step, all parameters, gradients and buffers after it, and the error that ended it, if any."""
    seen: list[Any] = []
    try:
        model = wrap(feature.build(), **feature.options)
        prepare(model)
        optimizer = sgd(model)
        for step in range(steps):
            result = feature.train(model, optimizer, step)
            seen += [result, *((name, tensor.clone(), tensor.stride()) for name, tensor in state(model).items())]
    except Exception as error:
        seen.append(ended_by(error))
    return seen


def training(
    build: Callable[[], nn.Module],
    train: Any = plain_train,
    prepare: Callable[[Model], object] = lambda _: None,
    **options: Any,
) -> Observe:
    """The behaviour of training this model."""
    return lambda wrap: trained(wrap, Feature(build, train, options), prepare)


def ended_by(error: Exception) -> str:
    """The kind of an error and how its message begins, which is what torch's tests look for."""
    return f"{type(error).__name__}: {str(error)[:60]}"


def attempt(action: Callable[[], object]) -> object:
    """What an action returns, or how it ended."""
    try:
        return action()
    except Exception as error:
        return ended_by(error)


def difference(expected: list[Any], found: list[Any]) -> str:
    """The first thing that differs between two lists; empty if nothing does."""
    for place, (theirs, ours) in enumerate(zip(expected, found, strict=False)):
        if not same(theirs, ours):
            return f"at {place} of {len(expected)}: {ours}, under stock DDP {theirs}"
    if len(expected) != len(found):
        return f"{len(found)} things seen, under stock DDP {len(expected)}; the last: {found[-1:]}, {expected[-1:]}"
    return ""


def same(expected: Any, found: Any) -> bool:
    """Whether two values are equal to the last bit."""
    if isinstance(expected, torch.Tensor):
        return close(expected, found, 0.0)
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        return len(expected) == len(found) and all(map(same, expected, found))
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        return expected.keys() == found.keys() and all(same(expected[key], found[key]) for key in expected)
    return bool(expected == found)
