"""Behaviours of DDP that torch tests outside its wheel, as differential tests of our own.

Torch's repository tests more of DDP than its wheel brings: process groups written in Python, activation checkpoints,
comm hooks, wrong use, all kinds of outputs, compiled models. A behaviour here is a function of a wrapper that returns
what one rank sees. A test runs it under stock DDP and under the wrapper in its place, and compares to the last bit.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_distributed import MultiProcessTestCase

from parallel.test_features import FEATURES
from parallel.twins import Feature
from torch_suite import checkpoints, comm_hooks, compiled, misuse, uses
from torch_suite.observed import Observe, Wrap, difference, trained
from torch_suite.python_groups import Done, PythonGroup, done_future


def on_group(feature: Feature, make_group: Callable[[], dist.ProcessGroup | None]) -> Observe:
    """The behaviour of a feature on a process group."""

    def observe(wrap: Wrap) -> list[Any]:
        return trained(wrap, replace(feature, options={**feature.options, "process_group": make_group()}))

    return observe


def by_name() -> dict[str, tuple[int, Observe]]:
    """Each behaviour with the number of ranks that it needs."""
    found: dict[str, tuple[int, Observe]] = {}
    for module in (checkpoints, comm_hooks, compiled, misuse, uses):
        found |= {name: (2, observe) for name, observe in module.behaviours()}
    for name, feature in FEATURES.items():
        called = name.replace(",", "").replace("-", "_").replace(" ", "_")
        python_group = on_group(feature, lambda: PythonGroup(dist.group.WORLD, Done))
        found[f"feature_{called}"] = 2, on_group(feature, lambda: None)
        found[f"python_group_{called}"] = 2, python_group
        found[f"one_rank_python_work_{called}"] = 1, on_group(feature, lambda: PythonGroup(None, Done))
        found[f"one_rank_python_future_{called}"] = 1, on_group(feature, lambda: PythonGroup(None, done_future))
    return found


class Behaviour(MultiProcessTestCase):
    """One test for each behaviour; what stands for DDP is found where users find it, in ``torch.nn.parallel``."""

    behaviour: str

    @property
    def world_size(self) -> int:
        return by_name()[self._current_test_name().removeprefix("test_")][0]

    @property
    def destroy_pg_upon_exit(self) -> bool:
        return False

    def check(self, name: str) -> None:
        """On one rank: the same under both wrappers."""
        world_size, observe = by_name()[name]
        expected = self.observed(observe, DistributedDataParallel, f"{self.file_name}-stock", world_size)
        found = self.observed(observe, torch.nn.parallel.DistributedDataParallel, self.file_name, world_size)
        self.assertEqual(difference(expected, found), "")

    def observed(self, observe: Observe, wrap: Any, rendezvous: str, world_size: int) -> list[Any]:
        """What this rank sees under this wrapper, in a process group of its own."""
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=self.rank, world_size=world_size)
        torch.manual_seed(7)
        seen = observe(wrap)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        return seen


for each in by_name():
    setattr(Behaviour, f"test_{each}", lambda self, name=each: self.check(name))
