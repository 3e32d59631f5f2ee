"""What one step of a model holds in memory, moment by moment: what ``probe.py`` finds and ``account.py`` adds up."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

BLOCK_NBYTES = 512  # CUDA's caching allocator hands out whole blocks of this size


def blocks(nbytes: int) -> int:
    """``nbytes`` as the allocator counts them."""
    return -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES


class Moment(NamedTuple):
    """Bytes beside weights and optimizer state: activations with their gradients and the batch; gradients of weights
    between autograd and whoever takes them; and what single operations need for themselves."""

    activations: int
    gradients: int = 0
    workspace: int = 0

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(self)


@dataclass(frozen=True, slots=True)
class Arrival:
    """The gradient of a parameter, and memory until it came.

    highest     the fullest moment since the arrival before (since the start of forward, for the first)
    then        the moment of its arrival, itself included
    sparse      whether it may travel sparsely: a float32 matrix; vectors never do
    """

    name: str
    numel: int
    nbytes: int
    highest: Moment
    then: Moment
    sparse: bool = True


class OptimizerCost(NamedTuple):
    """What an optimizer remembers of all parameters, and what its step needs for a while."""

    state: int = 0
    workspace: int = 0


NO_OPTIMIZER = OptimizerCost()


@dataclass(frozen=True, slots=True)
class Profile:
    """One step at one batch size, every gradient taken away the moment it comes.

    weights     parameters and buffers
    arrivals    gradients in the order of backward
    after       when backward is over: the batch, and what the program still holds
    """

    weights: int
    arrivals: tuple[Arrival, ...]
    after: Moment
    optimizer: OptimizerCost = NO_OPTIMIZER

    def __post_init__(self) -> None:
        """Refuse a step that trains nothing."""
        if not self.arrivals:
            raise ValueError("the step has no gradients: expected a model with parameters that its loss depends on")

    @property
    def gradients_nbytes(self) -> int:
        """Of all gradients together."""
        return sum(arrival.nbytes for arrival in self.arrivals)

    @property
    def numel(self) -> int:
        """Elements of all gradients together."""
        return sum(arrival.numel for arrival in self.arrivals)


class BucketSize(NamedTuple):
    """A bucket: which of the arrivals it holds, how large it is, and whether it travels sparsely."""

    arrivals: tuple[int, ...]
    numel: int
    nbytes: int
    sparse: bool

    @property
    def complete(self) -> int:
        """The arrival with which it is."""
        return max(self.arrivals)


def by_bytes(profile: Profile, cap_nbytes: int, sparsely: bool) -> list[BucketSize]:
    """Buckets of about ``cap_nbytes`` in the order of backward; ``sparsely``: those that must travel dense apart."""
    found: list[BucketSize] = []
    open_of: dict[bool, list[int]] = {True: [], False: []}

    def close(sparse: bool) -> None:
        if indices := tuple(open_of[sparse]):
            found.append(bucket_of(profile, indices, sparse and sparsely))
            open_of[sparse] = []

    for index, arrival in enumerate(profile.arrivals):
        kind = arrival.sparse or not sparsely
        open_of[kind].append(index)
        if sum(profile.arrivals[i].nbytes for i in open_of[kind]) >= cap_nbytes:
            close(kind)
    close(True)
    close(False)
    return found


def by_names(profile: Profile, buckets: Sequence[Sequence[str]]) -> list[BucketSize]:
    """Buckets as a plan names them; sparse are those of which every gradient may be."""
    place = {arrival.name: index for index, arrival in enumerate(profile.arrivals)}
    found = []
    for names in buckets:
        if unknown := [name for name in names if name not in place]:
            raise ValueError(f"a bucket names {unknown[0]}, which has no gradient in this step: plan for this model")
        indices = tuple(place[name] for name in names)
        found.append(bucket_of(profile, indices, all(profile.arrivals[index].sparse for index in indices)))
    return found


def bucket_of(profile: Profile, indices: Sequence[int], sparse: bool) -> BucketSize:
    """The bucket of these arrivals."""
    chosen = [profile.arrivals[index] for index in indices]
    numel, nbytes = sum(a.numel for a in chosen), sum(a.nbytes for a in chosen)
    return BucketSize(tuple(indices), numel, nbytes, sparse)
