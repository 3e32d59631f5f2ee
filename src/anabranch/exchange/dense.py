"""The dense exchange: every element is sent in full precision, and nothing is kept between steps."""

from math import inf

import torch
import torch.distributed as dist

from anabranch.exchange.interface import Collective, ExchangeFamily, Group, Steps, Traffic, issued
from anabranch.values.kinds.names import is_dense
from anabranch.values.plan import Bucket


def dense(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
    """All-reduce in the buffer's own precision. Scales first, as DDP does, so that the sum of many ranks fits."""
    if divisor != 1:  # a share is divided inside its node
        buffer.mul_(1.0 / divisor)
    yield issued(dist.all_reduce(buffer, group=group, async_op=True))


# An element of this magnitude, in a gradient that joins a residual, counts as not finite. Two ranks' residuals of 3e38
# have no finite sum: they could never be sent, and all later steps would be skipped.
SUMMABLE_BELOW = torch.finfo(torch.float32).max / (1 << 20)


def dense_traffic(numel: int, dtype: torch.dtype, ranks: int) -> Traffic:
    """Bytes that one rank sends and receives in a dense exchange."""
    nbytes = 2 * (ranks - 1) * numel * dtype.itemsize // ranks
    return Traffic(nbytes, nbytes, 1.0)


class DenseExchanges(ExchangeFamily):
    """The family of the dense exchange, which takes any dtype and keeps nothing. Plans may always use it."""

    def handles(self, kind: str) -> bool:
        return is_dense(kind)

    def supports(self, kind: str, dtype: torch.dtype) -> bool:  # noqa: ARG002 - any dtype
        return is_dense(kind)

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:  # noqa: ARG002
        return dense(buffer, group, divisor)

    def traffic(self, bucket: Bucket, numel: int, dtype: torch.dtype, ranks: int) -> Traffic:  # noqa: ARG002
        return dense_traffic(numel, dtype, ranks)

    def probe(self, kind: str) -> Collective:  # noqa: ARG002
        return dense


def all_finite(*tensors: torch.Tensor, below: float = inf) -> torch.Tensor:
    """Whether every element of all tensors has a magnitude under ``below`` (so it is finite): a bool on their device.

    Takes few kernels per tensor and no copy: the largest magnitude, which is NaN if an element is, is compared.
    """
    flags = [_largest_magnitude(tensor) < below for tensor in tensors if tensor.numel()]
    if not flags:  # an empty tensor has no largest element
        return torch.ones((), dtype=torch.bool, device=tensors[0].device if tensors else None)
    return flags[0] if len(flags) == 1 else torch.stack(flags).all()


def _largest_magnitude(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex() or tensor.is_cuda:
        norm: torch.Tensor = torch.linalg.vector_norm(tensor, inf)
        return norm
    low, high = torch.aminmax(tensor)  # on a CPU 20 times as fast as the norm
    return torch.maximum(-low, high)
