"""Predicts peak memory by kind of object for every mode of training: the arithmetic on what ``probe.py`` found.

    ddp             weights n, gradients n (views of buckets), optimizer state
    naive sparse    weights n, gradients n, residual n; after backward a flat copy of all gradients, its magnitudes, an
                    all-gather of 2kP words and a decompressed update: n each, but for the second last
    oktopk          ddp, a residual, an owner's sums for every bucket, messages of fixed size
    lean            weights n, residual n, which is also where gradients add up, two slots of the largest bucket
    lean, host      weights n, four slots: the residual is in host memory

A peak is the highest of many moments: each part of backward between two gradients, each bucket's exchange, and the
optimizer's step. Not counted: what NCCL and the CUDA context take, which torch's allocator does not see, and
fragmentation of its memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from anabranch.estimate.step_profile import BucketSize, MemoryUse, StepProfile, buckets_by_names, buckets_by_size
from anabranch.lean.slots import SLOTS
from anabranch.sparse.options import OkTopk
from anabranch.sparse.select import CHUNK_NUMEL
from anabranch.sparse.sizes import Sizes, widest_numel

KINDS = ("weights", "gradients", "residual", "optimizer state", "activations", "send", "receive", "workspace")
DDP, NAIVE, OKTOPK, LEAN, LEAN_HOST = MODES = ("ddp", "naive sparse", "oktopk", "lean", "lean, host")
BUCKET_NBYTES = 25 * 2**20  # DDP's own
BLAS_WORKSPACE_NBYTES = 2 * 32 * 2**20  # cuBLAS's on an H100 or H200: one for the thread of forward, one for backward's
PAIR_NBYTES = 8  # a float32 value and its int32 position


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device by kind at one moment of a step, which ``at`` names, and pinned host bytes beside them."""

    kinds: Mapping[str, int]
    at: str
    host_nbytes: int = 0

    def __post_init__(self) -> None:
        if unknown := [kind for kind in self.kinds if kind not in KINDS]:
            raise ValueError(f"a footprint has the kind {unknown[0]!r}: expected some of {', '.join(KINDS)}")
        object.__setattr__(self, "kinds", {kind: int(self.kinds.get(kind, 0)) for kind in KINDS})

    @property
    def nbytes(self) -> int:
        """Bytes on the device of all kinds."""
        return sum(self.kinds.values())

    def plus(self, at: str = "", /, **more: int) -> "Footprint":
        """Return the footprint with more bytes of some kinds, at another moment."""
        return Footprint({kind: self.kinds[kind] + more.get(kind, 0) for kind in KINDS}, at, self.host_nbytes)

    def plus_use(self, at: str, use: MemoryUse, **more: int) -> "Footprint":
        """Return the footprint with what the step itself uses at a moment, and more."""
        return self.plus(at, **{kind: more.get(kind, 0) + getattr(use, kind, 0) for kind in KINDS})


@dataclass(frozen=True)
class Setting:
    """How the model is trained, apart from the mode.

    ranks, density          how many ranks exchange, and what share of a sparse bucket's elements
    buckets                 of parameter names, as a plan has them; None: 25 MiB each, in the order of backward
    blas_workspace_nbytes   what cuBLAS keeps for itself
    """

    ranks: int = 4
    density: float = 0.01
    buckets: Sequence[Sequence[str]] | None = None
    options: OkTopk = field(default_factory=OkTopk)
    blas_workspace_nbytes: int = BLAS_WORKSPACE_NBYTES

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks is {self.ranks}: expected a whole number from 1 on")
        if not 0 < self.density <= 1:
            raise ValueError(f"density is {self.density}: expected a share of the elements in (0, 1], such as 0.01")


def predict(profile: StepProfile, mode: str, setting: Setting | None = None) -> Footprint:
    """Return the footprint at the moment of a step when most memory is in use, in one of ``MODES``."""
    if mode not in _MOMENTS_OF:
        raise ValueError(f"mode is {mode!r}: expected one of {', '.join(MODES)}")
    return max(_MOMENTS_OF[mode](profile, setting or Setting()), key=lambda footprint: footprint.nbytes)


def _always(profile: StepProfile, setting: Setting, **kinds: int) -> Footprint:
    """Return what is in memory during the whole step."""
    every_mode = {
        "weights": profile.weights_nbytes,
        "optimizer state": profile.optimizer.state_nbytes,
        "workspace": setting.blas_workspace_nbytes,
    }
    return Footprint(every_mode, "").plus(**kinds)


def _ddp(profile: StepProfile, setting: Setting) -> Iterator[Footprint]:
    always = _always(profile, setting, gradients=profile.gradients_nbytes)
    yield from _backward(profile, always)
    yield _optimizer_step(profile, always)


def _naive(profile: StepProfile, setting: Setting) -> Iterator[Footprint]:
    n = profile.gradients_nbytes
    always = _always(profile, setting, residual=n)
    ready_nbytes = 0
    for gradient in profile.gradients:  # gradients stay where autograd puts them
        yield always.plus_use(_before(gradient.name), gradient.peak_before, gradients=ready_nbytes)
        ready_nbytes += gradient.nbytes
    k = max(1, round(setting.density * profile.numel))
    after = always.plus_use("exchange", profile.after_backward, gradients=n)
    # A flat copy of all gradients, to which the residual is added; its magnitudes; values and int64 positions of k.
    yield after.plus("selection", workspace=2 * n + 12 * k)
    gathered = PAIR_NBYTES * k * setting.ranks
    yield after.plus("decompression", workspace=2 * n, send=PAIR_NBYTES * k, receive=gathered)
    yield _optimizer_step(profile, always.plus(gradients=n))


def _oktopk(profile: StepProfile, setting: Setting) -> Iterator[Footprint]:
    buckets = _buckets(profile, setting)
    residual = sum(_residual_nbytes(bucket) for bucket in buckets if bucket.sparse)
    always = _always(profile, setting, gradients=profile.gradients_nbytes, residual=residual)
    always = always.plus(workspace=_owner_sums_nbytes(buckets, setting))
    yield from _backward(profile, always)
    yield from _exchanges(profile, setting, buckets, always)
    yield _optimizer_step(profile, always)


def _lean(profile: StepProfile, setting: Setting, host: bool = False) -> Iterator[Footprint]:
    buckets = _buckets(profile, setting)
    largest = max(bucket.nbytes for bucket in buckets)
    largest_sparse = max((_residual_nbytes(bucket) for bucket in buckets if bucket.sparse), default=0)
    residual = sum(_residual_nbytes(bucket) for bucket in buckets if bucket.sparse)
    on_device = SLOTS * largest_sparse if host else residual
    always = _always(profile, setting, gradients=SLOTS * largest, residual=on_device)
    if setting.options.deterministic:  # else an owner adds its sums up in the slot
        always = always.plus(workspace=_owner_sums_nbytes(buckets, setting))
    if host:
        always = Footprint(always.kinds, "", residual)
    yield from _backward(profile, always, _incomplete_dense_nbytes(profile, buckets))
    yield from _exchanges(profile, setting, buckets, always)
    share = largest / max(1, profile.gradients_nbytes)  # each bucket has a step of its own
    workspace = int(share * profile.optimizer.workspace_nbytes)
    yield always.plus_use("a bucket's step", profile.after_backward, workspace=workspace)


def _lean_host(profile: StepProfile, setting: Setting) -> Iterator[Footprint]:
    yield from _lean(profile, setting, host=True)


_MOMENTS_OF: Mapping[str, Callable[[StepProfile, Setting], Iterator[Footprint]]] = {
    DDP: _ddp, NAIVE: _naive, OKTOPK: _oktopk, LEAN: _lean, LEAN_HOST: _lean_host,
}  # fmt: skip


def _before(name: str) -> str:
    return f"until the gradient of {name}"


def _backward(
    profile: StepProfile, always: Footprint, gradients_nbytes: Sequence[int] | None = None
) -> Iterator[Footprint]:
    """The peak before each gradient; ``gradients_nbytes``: those that are in memory then beside ``always``."""
    for index, gradient in enumerate(profile.gradients):
        nbytes = gradients_nbytes[index] if gradients_nbytes else 0
        yield always.plus_use(_before(gradient.name), gradient.peak_before, gradients=nbytes)


def _optimizer_step(profile: StepProfile, always: Footprint) -> Footprint:
    return always.plus_use("optimizer step", profile.after_backward, workspace=profile.optimizer.workspace_nbytes)


def _exchanges(
    profile: StepProfile, setting: Setting, buckets: Sequence[BucketSize], always: Footprint
) -> Iterator[Footprint]:
    """The moments when each sparse bucket is complete; the messages of the bucket before are still in memory."""
    before = {"send": 0, "receive": 0, "workspace": 0}
    for bucket in sorted((bucket for bucket in buckets if bucket.sparse), key=lambda bucket: bucket.last_index):
        gradient = profile.gradients[bucket.last_index]
        messages, balancing = _messages(bucket, setting)
        for own in (messages, balancing):
            together = {kind: before[kind] + own[kind] for kind in before}
            yield always.plus_use(f"exchange of the bucket to {gradient.name}", gradient.when_ready, **together)
        before = messages


def _messages(bucket: BucketSize, setting: Setting) -> tuple[dict[str, int], dict[str, int]]:
    """Return what an exchange of fixed-size messages needs: in a usual step, and while it balances regions."""
    ranks = setting.ranks
    sizes = Sizes.of(bucket.numel, ranks, setting.density, setting.options)
    send = (ranks + 1) * sizes.message_nbytes
    sums = 2 * 4 * ranks * sizes.capacity
    # Packed messages: beside them rows of pairs, to every rank and from it.
    rows = PAIR_NBYTES * (3 * ranks + 1) * sizes.capacity if sizes.encoding.rounds else 0
    in_float32 = _residual_nbytes(bucket) if bucket.nbytes < _residual_nbytes(bucket) else 0  # a copy of the gradients
    workspace = sums + rows + in_float32
    usual = {"send": send, "receive": 2 * ranks * sizes.message_nbytes, "workspace": workspace}
    # Chunk by chunk: residual plus gradient, then what passes the threshold as bytes and as counts of two widths.
    balancing = 0 if sizes.selects_all else (4 + 1 + 4 + 8) * min(bucket.numel, CHUNK_NUMEL)
    return usual, {"send": send, "receive": 0, "workspace": balancing + in_float32}


def _residual_nbytes(bucket: BucketSize) -> int:
    """Bytes of a bucket's residual, which is float32."""
    return 4 * bucket.numel


def _owner_sums_nbytes(buckets: Sequence[BucketSize], setting: Setting) -> int:
    """Bytes of the buffer in which a region's owner sums: all buckets share one, for the widest region."""
    return max((4 * widest_numel(bucket.numel, setting.ranks) for bucket in buckets if bucket.sparse), default=0)


def _incomplete_dense_nbytes(profile: StepProfile, buckets: Sequence[BucketSize]) -> list[int]:
    """For each gradient, bytes of dense buckets that are incomplete before it: their gradients stay where they came."""
    nbytes = [0] * (len(profile.gradients) + 1)
    for bucket in (bucket for bucket in buckets if not bucket.sparse):
        for index in bucket.indices:
            for later in range(index + 1, bucket.last_index + 1):
                nbytes[later] += profile.gradients[index].nbytes
    return nbytes


def _buckets(profile: StepProfile, setting: Setting) -> list[BucketSize]:
    if setting.buckets is None:
        return buckets_by_size(profile, BUCKET_NBYTES)
    return buckets_by_names(profile, setting.buckets)
