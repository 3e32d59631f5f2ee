"""The tests of the torch wheel that name DistributedDataParallel, as classes whose ranks are forked.

Nothing here is a copy: the classes of ``torch.testing._internal`` are imported and given what the wheel leaves out,
the way in which ranks are started.
"""

import inspect
import unittest
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.testing._internal.common_device_type  # before anything pretends to be a GPU
from torch import multiprocessing
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.distributed.ddp_under_dist_autograd_test import (
    CudaDdpComparisonTest,
    DdpComparisonTest,
    DdpUnderDistAutogradTest,
)
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend
from torch.testing._internal.distributed.rpc.rpc_test import RpcTest
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

from torch_suite.behaviours import Behaviour

DDP_NAMES = {"DistributedDataParallel", "DDP"}


class ForkedRanks:
    """Ranks by fork: torch is imported already, and the children have the wrapper that was put in place of DDP."""

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        self._start_processes(multiprocessing.get_context("fork").Process)  # type: ignore[attr-defined]

    @classmethod
    def _run(cls, *args: Any, **options: Any) -> None:
        torch.set_num_threads(
            1
        )  # now: torch replaces the forked pool at first use, and two threads at once abort there
        super()._run(*args, **options)  # type: ignore[misc]


class Distributed(ForkedRanks, TestDistBackend, DistributedTest._DistTestBase):
    """torch.testing._internal.distributed.distributed_test."""


class UnderDistAutograd(ForkedRanks, DdpUnderDistAutogradTest, TensorPipeRpcAgentTestFixture, MultiProcessTestCase):
    """torch.testing._internal.distributed.ddp_under_dist_autograd_test, the hybrid model."""


class Comparison(ForkedRanks, DdpComparisonTest, TensorPipeRpcAgentTestFixture, MultiProcessTestCase):
    """torch.testing._internal.distributed.ddp_under_dist_autograd_test, local against distributed autograd."""


class CudaComparison(ForkedRanks, CudaDdpComparisonTest, TensorPipeRpcAgentTestFixture, MultiProcessTestCase):
    """torch.testing._internal.distributed.ddp_under_dist_autograd_test, on GPUs."""


class Rpc(ForkedRanks, RpcTest, TensorPipeRpcAgentTestFixture, MultiProcessTestCase):
    """torch.testing._internal.distributed.rpc.rpc_test."""


class Behaviours(ForkedRanks, Behaviour):
    """Our own."""


CLASSES: dict[str, type[unittest.TestCase]] = {
    kind.__name__: kind for kind in (Distributed, UnderDistAutograd, Comparison, CudaComparison, Rpc, Behaviours)
}


def names() -> list[str]:
    """``Class.test`` of each test whose code, or a function that it names, says DistributedDataParallel."""
    loader = unittest.TestLoader()
    return [
        f"{kind}.{test}"
        for kind, cls in CLASSES.items()
        for test in loader.getTestCaseNames(cls)
        if cls is Behaviours or _names_ddp(cls, getattr(cls, test))
    ]


def case(name: str) -> unittest.TestCase:
    """The test of this name, ready to run."""
    kind, test = name.split(".")
    return CLASSES[kind](test)


def _names_ddp(cls: type, function: Any) -> bool:
    seen: set[Any] = set()
    waiting = [function]
    while waiting:
        current = inspect.unwrap(waiting.pop())
        if isinstance(current, type) and current.__module__.startswith("torch.testing") and not _has_tests(current):
            waiting += [member for member in vars(current).values() if isinstance(member, FunctionType)]
        if not isinstance(current, FunctionType) or current in seen or not _is_torchs_test(current):
            continue
        seen.add(current)
        used = set(_used(current.__code__))
        if used & DDP_NAMES:
            return True
        waiting += [getattr(cls, name, None) or current.__globals__.get(name) for name in used]
    return False


def _has_tests(cls: type) -> bool:
    return any(name.startswith("test") for name in dir(cls))


def _is_torchs_test(function: FunctionType) -> bool:
    return "/torch/testing/" in function.__code__.co_filename


def _used(code: CodeType) -> Iterator[str]:
    """The names that a function's code looks up, with those of functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _used(constant)
