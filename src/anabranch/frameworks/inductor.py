"""A measured network as inductor's estimator of collectives.

torch.compile schedules functional collectives, as FSDP2 and tensor parallelism use them, by what it believes they take.
It derives that from the generation of the GPU. A measured ``Network`` knows better:

    network = anabranch.load("network.json")  # of anabranch measure
    with inductor_believes(network):
        train(torch.compile(model))  # what is compiled in here is scheduled by this network's costs
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._C._distributed_c10d import _resolve_process_group

from anabranch.values.compatibility import check_seams, unsupported
from anabranch.values.network import Network

TESTED = "2.13.0"  # in CI; 2.11 and 2.15 by hand
# By operation, its share of an all-reduce of the whole tensor, which is a reduce-scatter and an all-gather.
SHARES = {"all_reduce": 1.0, "all_gather_into_tensor": 0.5, "reduce_scatter_tensor": 0.5}

ESTIMATOR_ARGUMENTS = ("override_size", "custom_runtime_estimation")  # of the function that asks the estimator

Estimate = Callable[[fx.Node, int | None], float | None]


@contextmanager
def inductor_believes(network: Network) -> Iterator[None]:
    """A context in which inductor takes the costs of collectives from this network, the same on every rank.

    Turn on ``torch._inductor.config.aten_distributed_optimizations.enable_overlap_scheduling`` to have it schedule by
    them. RuntimeError on a torch whose inductor asks nobody.
    """
    options = _options()
    if not hasattr(options, "custom_runtime_estimation"):
        where = "torch._inductor.config.aten_distributed_optimizations"
        raise unsupported("torch", TESTED, f"{where} has no custom_runtime_estimation")
    check_seams("torch", TESTED, _scheduling(), {"estimate_collective_time": ESTIMATOR_ARGUMENTS})
    before = options.custom_runtime_estimation
    options.custom_runtime_estimation = partial(estimated_ms, network, before)
    try:
        yield
    finally:
        options.custom_runtime_estimation = before


def estimated_ms(
    network: Network, otherwise: Estimate | None, node: fx.Node, override_size: int | None = None
) -> float | None:
    """Milliseconds that this collective takes on the network, at its group's size; for other operations ``otherwise``.

    ``override_size``: bytes of inputs and outputs together, instead of the node's own.
    """
    share = SHARES.get(_operation(node))
    if share is None:
        return otherwise(node, override_size) if otherwise is not None else None
    ranks = _ranks(node)
    nbytes = _whole_nbytes(node) if override_size is None else int(override_size * _whole_share(share, ranks))
    return share * network.at(ranks).allreduce_s(nbytes) * 1e3


def _options() -> Any:
    """Inductor's options for collectives; None if this torch has none."""
    import torch._inductor.config as config

    return getattr(config, "aten_distributed_optimizations", None)


def _scheduling() -> Any:
    """Inductor's module that asks the estimator."""
    import torch._inductor.fx_passes.overlap_scheduling as scheduling

    return scheduling


def _operation(node: fx.Node) -> str:
    """The name of a functional collective, such as all_reduce; empty for other operations."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "_c10d_functional":
        return ""
    return target._opname.removesuffix("_out").removesuffix("_")


def _ranks(node: fx.Node) -> int:
    """The size of the group, whose name is the last text among the arguments."""
    name: Any = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, str)][-1]
    return _resolve_process_group(name).size()


def _whole_nbytes(node: fx.Node) -> int:
    """Bytes of the whole tensor: what is gathered, scattered or reduced."""
    values = [node.meta.get("val"), *(argument.meta.get("val") for argument in node.all_input_nodes)]
    return max(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))


def _whole_share(share: float, ranks: int) -> float:
    """The whole tensor's share of inputs and outputs together: both are whole, or one is a rank's part."""
    return 0.5 if share == 1.0 else ranks / (ranks + 1)
