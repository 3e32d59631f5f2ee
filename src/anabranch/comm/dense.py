"""Dense exchanges: every element is sent, in full precision or as bfloat16. They keep nothing between steps."""

from collections.abc import Mapping
from math import inf

import torch
import torch.distributed as dist

from anabranch.comm.exchange import Collective, Group, Steps, Traffic, all_gather, issued, record_stream
from anabranch.plan import Bucket


def dense(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
    """All-reduce in the buffer's own precision. Scales first, as DDP does, so that the sum of many ranks fits."""
    buffer.mul_(1.0 / divisor)
    yield issued(dist.all_reduce(buffer, group=group, async_op=True))


def bf16(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
    """bfloat16 on the wire, sums in float32: half the bytes of float32, and rounding that does not grow with ranks.

    Every rank rounds its contribution, receives all contributions to its own share, adds them in float32, rounds the
    average, and gathers the shares of all ranks. Each value is rounded twice, however many ranks there are. All ranks
    end with the same bits. A buffer that is not float32 is sent by ``dense``.
    """
    if buffer.dtype != torch.float32:
        yield from dense(buffer, group, divisor)
        return
    ranks = dist.get_world_size(group)
    share = -(-buffer.numel() // ranks)
    rounded = torch.zeros(ranks * share, dtype=torch.bfloat16, device=buffer.device)
    rounded[: buffer.numel()].copy_(buffer)
    received = torch.empty_like(rounded)
    yield issued(dist.all_to_all_single(received, rounded, group=group, async_op=True))
    record_stream(rounded, received)
    average = received.view(ranks, share).sum(dim=0, dtype=torch.float32).mul_(1.0 / divisor)
    yield issued(all_gather(rounded, average.to(torch.bfloat16), group))
    buffer.copy_(rounded[: buffer.numel()])


# An element of this magnitude, in a gradient that joins a residual, counts as not finite. Two ranks' residuals of 3e38
# have no finite sum: they could never be sent, and all later steps would be skipped.
SUMMABLE_BELOW = torch.finfo(torch.float32).max / (1 << 20)

COLLECTIVES: Mapping[str, Collective] = {"dense": dense, "bf16": bf16}


def dense_traffic(kind: str, numel: int, dtype: torch.dtype, ranks: int) -> Traffic:
    """Bytes that one rank sends and receives in a dense exchange of this kind."""
    if kind == "bf16" and dtype == torch.float32:
        nbytes = 2 * (ranks - 1) * -(-numel // ranks) * torch.bfloat16.itemsize
    else:
        nbytes = 2 * (ranks - 1) * numel * dtype.itemsize // ranks
    return Traffic(nbytes, nbytes, 1.0)


class DenseExchanges:
    """The family of dense exchanges. ``kinds``: those that plans may use in addition to "dense"."""

    def __init__(self, kinds: tuple[str, ...] = ()) -> None:
        self.kinds = kinds

    def handles(self, kind: str) -> bool:
        return kind in COLLECTIVES

    def supports(self, kind: str, dtype: torch.dtype) -> bool:  # noqa: ARG002 - any dtype
        return kind in COLLECTIVES

    def on_side_stream(self, kind: str) -> bool:  # noqa: ARG002 - dense exchanges send at once
        return False

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        return COLLECTIVES[bucket.collective](buffer, group, divisor)

    def traffic(self, bucket: Bucket, numel: int, dtype: torch.dtype, ranks: int) -> Traffic:
        return dense_traffic(bucket.collective, numel, dtype, ranks)

    def probe(self, kind: str) -> Collective:
        return COLLECTIVES[kind]

    def close(self) -> None:
        """No-op: nothing is kept."""


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
