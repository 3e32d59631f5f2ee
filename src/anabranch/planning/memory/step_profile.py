"""Memory of one training step as its gradients become ready: made by ``estimate.probe``, or of a live model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# cuDNN's own workspace, times the bytes of a convolution's tensors: it converts them to its own layout and back.
CONVOLUTION_WORKSPACE = 1.0
ALLOCATION_NBYTES = 512  # CUDA's caching allocator hands out multiples of this


def allocated_nbytes(nbytes: int) -> int:
    """Return the bytes that the allocator takes for a tensor of ``nbytes``."""
    return -(-nbytes // ALLOCATION_NBYTES) * ALLOCATION_NBYTES


class MemoryUse(NamedTuple):
    """Bytes in use at one moment of a step, beside weights and optimizer state.

    activations   with their gradients and the batch
    gradients     of weights, from autograd until they are taken away
    workspace     what single operations need for themselves
    """

    activations: int
    gradients: int = 0
    workspace: int = 0

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(self)


@dataclass(frozen=True, slots=True)
class ReadyGradient:
    """The gradient of one parameter, and memory in use until it was ready.

    peak_before   the most in use since the gradient before was ready (since the start of forward, for the first)
    when_ready    in use at the moment when it was ready, itself included
    sparse        whether it may be sent sparsely: matrices may, of float32 or 16 bits, vectors never
    """

    name: str
    numel: int
    nbytes: int
    peak_before: MemoryUse
    when_ready: MemoryUse
    sparse: bool = True

    @property
    def wide(self) -> bool:
        """Whether its numbers have more than the 4 bytes of a float32."""
        return self.nbytes > allocated_nbytes(4 * self.numel)


class OptimizerMemory(NamedTuple):
    """Bytes of an optimizer's state for all parameters, and what its step needs beside that."""

    state_nbytes: int = 0
    workspace_nbytes: int = 0


NO_OPTIMIZER = OptimizerMemory()


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Memory of one step at one batch size, where every gradient is taken away as soon as it is ready.

    weights_nbytes     parameters and buffers
    gradients          in the order of backward
    after_backward     in use when backward is over: the batch, and what the program still holds
    offloaded_nbytes   activations that are in host memory between forward and backward
    """

    weights_nbytes: int
    gradients: tuple[ReadyGradient, ...]
    after_backward: MemoryUse
    optimizer: OptimizerMemory = NO_OPTIMIZER
    offloaded_nbytes: int = 0

    def __post_init__(self) -> None:
        if not self.gradients:
            raise ValueError("the step has no gradients: expected a model with parameters that its loss depends on")

    @property
    def gradients_nbytes(self) -> int:
        """Bytes of all gradients together."""
        return sum(gradient.nbytes for gradient in self.gradients)

    @property
    def numel(self) -> int:
        """Elements of all gradients together."""
        return sum(gradient.numel for gradient in self.gradients)


class BucketSize(NamedTuple):
    """A bucket: its gradients as indices into the profile's, its size, and whether it is compressed."""

    indices: tuple[int, ...]
    numel: int
    nbytes: int
    compressed: bool

    @property
    def last_index(self) -> int:
        """The gradient with which the bucket is complete."""
        return max(self.indices)


Compresses = Callable[[ReadyGradient], bool]  # whether a gradient may be in a bucket that is compressed


def buckets_by_size(profile: StepProfile, cap_nbytes: int, compresses: Compresses) -> list[BucketSize]:
    """Return buckets of about ``cap_nbytes`` in the order of backward; gradients not to be compressed are apart."""
    found: list[BucketSize] = []
    open_buckets: dict[bool, list[int]] = {True: [], False: []}  # by whether they are compressed

    def close(compressed: bool) -> None:
        if indices := open_buckets[compressed]:
            found.append(_bucket(profile, indices, compressed))
            open_buckets[compressed] = []

    for index, gradient in enumerate(profile.gradients):
        compressed = compresses(gradient)
        indices = open_buckets[compressed]
        indices.append(index)
        if sum(profile.gradients[i].nbytes for i in indices) >= cap_nbytes:
            close(compressed)
    close(True)
    close(False)
    return found


def buckets_by_names(
    profile: StepProfile, buckets: Sequence[Sequence[str]], compresses: Compresses
) -> list[BucketSize]:
    """Return buckets as a plan names them; a bucket is compressed if all its gradients may be."""
    index_of = {gradient.name: index for index, gradient in enumerate(profile.gradients)}
    found = []
    for names in buckets:
        if unknown := [name for name in names if name not in index_of]:
            raise ValueError(f"a bucket names {unknown[0]}, which has no gradient in this step: plan for this model")
        indices = [index_of[name] for name in names]
        found.append(_bucket(profile, indices, all(compresses(profile.gradients[index]) for index in indices)))
    return found


def _bucket(profile: StepProfile, indices: Sequence[int], compressed: bool) -> BucketSize:
    gradients = [profile.gradients[index] for index in indices]
    numel = sum(gradient.numel for gradient in gradients)
    nbytes = sum(gradient.nbytes for gradient in gradients)
    return BucketSize(tuple(indices), numel, nbytes, compressed)
