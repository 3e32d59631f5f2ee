"""Predicts the peak memory of a training step by kind of object, for DataParallel and for Lean: arithmetic, no torch.

The input is a ``StepProfile``: what the step itself has in memory as its gradients become ready. On top of that:

    DDP             weights n, gradients n (views of buckets), optimizer state
    oktopk          as DDP, a residual n, an owner's sums for the widest bucket, messages of fixed size
    bf16, int8      as DDP, messages with all values of a bucket, and an owner's rounding errors if they are kept
    int4            the same, and a residual n
    auto            as int4, which it may choose for every bucket
    int4@nodes      residuals and messages of a rank's share, n/R on R ranks per node, and a bucket's size inside nodes
                    to send and to receive; other kinds alike
    Lean, dense     weights n, slots: a bucket's gradients from when it is complete until it is updated, two at a time
    Lean, oktopk    weights n, residual n, which is also where gradients are summed, slots
    Lean, residuals in bf16 (or int8)    weights n, residual n/2 (n/4), slots, two more for residuals in float32
    Lean, int8      weights n, slots, the messages of int8; other kinds alike

With ``clips`` averages under Lean are held until the end of backward.

A peak is the largest of many moments: each part of backward between two gradients, each bucket's exchange, and the
optimizer's step. Not counted: what NCCL and the CUDA context take, which torch's allocator does not see, and
fragmentation of its memory.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from anabranch.planning.by_size import filled
from anabranch.values.kinds.fidelity import LEAST
from anabranch.values.kinds.formats import CHUNK_NUMEL, FORMATS, STORED, Sizes, widest_numel
from anabranch.values.kinds.names import AUTO, DENSE, OKTOPK, between_nodes, is_two_level
from anabranch.values.kinds.options import OkTopk, Quantised

KINDS = ("weights", "gradients", "residual", "optimizer state", "activations", "send", "receive", "workspace")
FRAGMENTATION = 0.05  # share of the memory that torch's allocator holds in pieces too small to use
BUCKET_NBYTES = 25 * 2**20  # DDP's own
BLAS_WORKSPACE_NBYTES = 2 * 32 * 2**20  # cuBLAS's on an H100 or H200: one for the thread of forward, one for backward's
PAIR_NBYTES = 8  # a float32 value and its int32 position
HELD_NBYTES = 12  # the same in torch's sparse tensors, with an int64 position
FLOAT_NBYTES = 4
NO_MESSAGES: Mapping[str, int] = {"send": 0, "receive": 0, "workspace": 0}

# cuDNN's own workspace, times the bytes of a convolution's tensors: it converts them to its own layout and back.
CONVOLUTION_WORKSPACE = 1.0
ALLOCATION_NBYTES = 512  # CUDA's caching allocator hands out multiples of this


def allocated_nbytes(nbytes: int) -> int:
    """Return the bytes that the allocator takes for a tensor of ``nbytes``."""
    return -(-nbytes // ALLOCATION_NBYTES) * ALLOCATION_NBYTES


class MemoryUse(NamedTuple):
    """Bytes in use at one moment of a step; weights and optimizer state are not included.

    activations   with their gradients and the batch
    gradients     of weights, from autograd until they are taken away
    workspace     temporary memory of single operations
    """

    activations: int
    gradients: int = 0
    workspace: int = 0

    @property
    def nbytes(self) -> int:
        """The sum."""
        return sum(self)


NO_USE = MemoryUse(0)


@dataclass(frozen=True, slots=True)
class ReadyGradient:
    """The gradient of one parameter, and memory in use until it was ready.

    peak_before   the largest use since the previous gradient was ready (for the first: since the start of forward)
    when_ready    the use at the moment when it was ready, itself included
    sparse        whether it may be sent sparsely: matrices of float32 or 16 bits may, vectors never
    """

    name: str
    numel: int
    nbytes: int
    peak_before: MemoryUse = NO_USE
    when_ready: MemoryUse = NO_USE
    sparse: bool = True

    @property
    def wide(self) -> bool:
        """Whether its elements have more than the 4 bytes of a float32."""
        return self.nbytes > allocated_nbytes(4 * self.numel)


class OptimizerMemory(NamedTuple):
    """Bytes of an optimizer's state for all parameters, and the workspace of its step."""

    state_nbytes: int = 0
    workspace_nbytes: int = 0


NO_OPTIMIZER = OptimizerMemory()


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Memory of one step at one batch size, in which every gradient is taken away as soon as it is ready.

    weights_nbytes   parameters and buffers
    gradients        in the order of backward
    after_backward   the use when backward is over: the batch, and what the program still holds
    """

    weights_nbytes: int
    gradients: tuple[ReadyGradient, ...]
    after_backward: MemoryUse
    optimizer: OptimizerMemory = NO_OPTIMIZER

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


SLOTS = 2  # of Lean: one for the bucket whose exchange runs, one for the next bucket


class BucketSize(NamedTuple):
    """A bucket: its gradients as indices into the profile's, its size, and whether it is compressed."""

    indices: tuple[int, ...]
    numel: int
    nbytes: int
    compressed: bool

    @property
    def last_index(self) -> int:
        """The gradient that completes the bucket."""
        return max(self.indices)


def buckets_by_size(
    profile: StepProfile, cap_nbytes: int, compresses: Callable[[ReadyGradient], bool]
) -> list[BucketSize]:
    """Return buckets of about ``cap_nbytes`` in the order of backward; those that cannot be compressed are separate."""
    gradients, found = profile.gradients, []
    for compressed in (True, False):
        indices = [index for index, gradient in enumerate(gradients) if compresses(gradient) == compressed]
        parts = filled(indices, lambda index: gradients[index].nbytes, cap_nbytes, cap_nbytes, reached=True)
        found += [_bucket(profile, part, compressed) for part in parts]
    return sorted(found, key=lambda bucket: bucket.last_index)


def _bucket(profile: StepProfile, indices: Sequence[int], compressed: bool) -> BucketSize:
    gradients = [profile.gradients[index] for index in indices]
    numel, nbytes = sum(gradient.numel for gradient in gradients), sum(gradient.nbytes for gradient in gradients)
    return BucketSize(tuple(indices), numel, nbytes, compressed)


ResidualPlacement = Literal["in place", "bf16", "int8"]


class TrainingMode(NamedTuple):
    """How a model is trained: by which exchange, on Lean or not, and how residuals are stored.

    exchange          "dense", "oktopk", "auto" or a kind that rounds; in DataParallel also on two levels, "int4@nodes"
    lean              whether Lean trains it; else DataParallel on DDP's buckets
    rounding_errors   whether an exchange that rounds keeps its errors; None: the default of its kind
    """

    exchange: str
    lean: bool = False
    residuals: ResidualPlacement = "in place"
    rounding_errors: bool | None = None

    @property
    def keeps_residual(self) -> bool:
        """Whether what is not sent in a step is kept for the next one."""
        if self.rounding_errors is not None or self.exchange == DENSE:
            return bool(self.rounding_errors)
        return self.exchange == OKTOPK or Quantised(self.kind).keeps_residual

    @property
    def kind(self) -> str:
        """The kind whose memory the exchange takes: of auto, the least faithful one."""
        return LEAST if self.exchange == AUTO else self.exchange

    def compresses(self, gradient: ReadyGradient) -> bool:
        """Whether this gradient may be in a bucket that is compressed: rounding also takes vectors and half floats."""
        if self.exchange == OKTOPK:
            return gradient.sparse
        return self.exchange != DENSE and not gradient.wide

    def sums_in_place(self, bucket: BucketSize) -> bool:
        """Whether this bucket's gradients are added to its residual one by one; else they wait for the others."""
        return self.residuals == "in place" and bucket.compressed and self.keeps_residual

    def stored_nbytes(self, bucket: BucketSize) -> int:
        """Bytes of this bucket's residual between exchanges; 0 if it has none."""
        if not (bucket.compressed and self.keeps_residual):
            return 0
        if (form := STORED.get(self.residuals)) is None:
            return FLOAT_NBYTES * bucket.numel
        return form.message_nbytes(form.region_numel(bucket.numel, 1))

    def buckets(self, profile: StepProfile, setting: "Setting") -> list[BucketSize]:
        """The buckets that this mode exchanges; of a plan's, those are compressed of which all gradients may be."""
        if setting.buckets is None:
            return buckets_by_size(profile, BUCKET_NBYTES, self.compresses)
        index_of = {gradient.name: index for index, gradient in enumerate(profile.gradients)}
        if unknown := [name for names in setting.buckets for name in names if name not in index_of]:
            raise ValueError(f"a bucket names {unknown[0]}, which has no gradient in this step: plan for this model")
        buckets = ([index_of[name] for name in names] for names in setting.buckets)
        return [_bucket(profile, one, all(self.compresses(profile.gradients[i]) for i in one)) for one in buckets]


DDP = TrainingMode(DENSE)


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device by kind at one moment of a step, which ``at`` names."""

    kinds: Mapping[str, int]
    at: str

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
        return Footprint({kind: self.kinds[kind] + more.get(kind, 0) for kind in KINDS}, at)

    def plus_use(self, at: str, use: MemoryUse, **more: int) -> "Footprint":
        """Return the footprint with what the step itself uses at a moment, and more of some kinds."""
        return self.plus(at, **{kind: more.get(kind, 0) + getattr(use, kind, 0) for kind in KINDS})


@dataclass(frozen=True)
class Setting:
    """What the footprint depends on, apart from the mode.

    ranks, density          how many ranks exchange, and what share of a sparse bucket's elements
    buckets                 parameter names by bucket, as a plan has them; None: 25 MiB each, in the order of backward
    clips                   whether gradients are clipped by their norm: then Lean holds averages until backward ends
    blas_workspace_nbytes   what cuBLAS keeps for itself
    ranks_per_node          those among which HSDP shards the model, and two-level exchanges their buckets; None: HSDP
                            has all ranks in one node, and others one in each
    """

    ranks: int = 4
    density: float = 0.01
    buckets: Sequence[Sequence[str]] | None = None
    clips: bool = False
    options: OkTopk = field(default_factory=OkTopk)
    blas_workspace_nbytes: int = BLAS_WORKSPACE_NBYTES
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks is {self.ranks}: expected a whole number from 1 on")
        if self.ranks_per_node is not None and (self.ranks_per_node < 1 or self.ranks % self.ranks_per_node):
            raise ValueError(
                f"ranks_per_node is {self.ranks_per_node}, and there are {self.ranks} ranks: expected a number that "
                "divides them into nodes of one size"
            )
        if not 0 < self.density <= 1:
            raise ValueError(f"density is {self.density}: expected a share of the elements in (0, 1], such as 0.01")


def peak_footprint(profile: StepProfile, mode: TrainingMode, setting: Setting | None = None) -> Footprint:
    """Return the footprint at the moment of a step when most memory is in use."""
    moments = _lean if mode.lean else _data_parallel
    return largest_footprint(moments(profile, setting or Setting(), mode))


def largest_footprint(footprints: Iterable[Footprint]) -> Footprint:
    """The first of the footprints with the most bytes on the device."""
    return max(footprints, key=lambda footprint: footprint.nbytes)


def constant_footprint(profile: StepProfile, setting: Setting, **kinds: int) -> Footprint:
    """Return what is in memory during the whole step: weights, optimizer state, cuBLAS's workspace, and ``kinds``."""
    of_every_mode = {
        "weights": profile.weights_nbytes,
        "optimizer state": profile.optimizer.state_nbytes,
        "workspace": setting.blas_workspace_nbytes,
    }
    return Footprint(of_every_mode, "").plus(**kinds)


def optimizer_step(profile: StepProfile, constant: Footprint) -> Footprint:
    """Return the footprint while the optimizer updates all weights at once."""
    return constant.plus_use("optimizer step", profile.after_backward, workspace=profile.optimizer.workspace_nbytes)


def until_gradient(name: str) -> str:
    """The moment in words while this gradient is computed."""
    return f"until the gradient of {name}"


def exchange_of(last: ReadyGradient) -> str:
    """The moment in words when the bucket that this gradient completes is exchanged."""
    return f"exchange of the bucket to {last.name}"


def _data_parallel(profile: StepProfile, setting: Setting, mode: TrainingMode) -> Iterator[Footprint]:
    in_stages, mode = is_two_level(mode.exchange), mode._replace(exchange=between_nodes(mode.exchange))
    buckets = sorted(mode.buckets(profile, setting), key=lambda bucket: bucket.last_index)
    sent = buckets
    if in_stages:  # of a bucket a rank exchanges a share with other nodes
        per_node = setting.ranks_per_node or 1
        sent = [b._replace(numel=-(-b.numel // per_node), nbytes=-(-b.nbytes // per_node)) for b in buckets]
        setting = replace(setting, ranks=setting.ranks // per_node, ranks_per_node=None)
    residual = sum(mode.stored_nbytes(share) for share in sent)
    constant = constant_footprint(profile, setting, gradients=profile.gradients_nbytes, residual=residual)
    constant = constant.plus(workspace=owner_sums_nbytes(sent, setting, mode))
    for gradient in profile.gradients:
        yield constant.plus_use(until_gradient(gradient.name), gradient.peak_before)
    previous = NO_MESSAGES  # the messages of the bucket before are still in memory
    for bucket, share in zip(buckets, sent, strict=True):
        if not (bucket.compressed or in_stages):
            continue
        gradient = profile.gradients[bucket.last_index]
        needed = exchange_nbytes(share, setting, mode)
        if in_stages:  # all stages together, since those of successive buckets overlap
            inside = {"send": bucket.nbytes, "receive": bucket.nbytes, "workspace": FLOAT_NBYTES * share.numel}
            needed = [_together(inside, each) for each in needed]
        for own in needed:
            yield constant.plus_use(exchange_of(gradient), gradient.when_ready, **_together(previous, own))
        previous = needed[0]
    yield optimizer_step(profile, constant)


def _together(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {kind: one[kind] + other[kind] for kind in one}


class _Slots:
    """What Lean holds of complete buckets at one moment of a step."""

    def __init__(self, mode: TrainingMode, setting: Setting) -> None:
        self._mode = mode
        self._setting = setting
        self._latest: deque[tuple[int, int]] = deque(maxlen=SLOTS)  # slots of gradients, and of residuals in float32
        self._held_nbytes = 0

    def take(self, bucket: BucketSize) -> None:
        """The next bucket is complete: the oldest slot is freed, unless averages are held."""
        with_residual = bucket.compressed and self._mode.keeps_residual
        if with_residual or not self._setting.clips:
            unpacked = FLOAT_NBYTES * bucket.numel if with_residual and self._mode.residuals in STORED else 0
            self._latest.append((bucket.nbytes, unpacked))
        if self._setting.clips:  # a sparse average is held as its non-zero values
            pairs = int(self._setting.density * bucket.numel) * HELD_NBYTES
            sparse = with_residual and self._mode.exchange == OKTOPK
            self._held_nbytes += min(bucket.nbytes, pairs) if sparse else bucket.nbytes

    def with_more(self, gradients: int, **more: int) -> dict[str, int]:
        """Bytes by kind: all slots, plus ``gradients`` and more."""
        slots, unpacked = (sum(sizes) for sizes in zip(*self._latest, strict=True)) if self._latest else (0, 0)
        return {"gradients": gradients + self._held_nbytes + slots, "residual": unpacked, **more}


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of Lean's step.

    footprint   what is in memory, except for what the step itself uses then
    index       of the gradient that is being computed, or is ready; the number of gradients: backward is over
    ready       whether that gradient is ready
    """

    footprint: Footprint
    index: int
    ready: bool = False


def lean_moments(profile: StepProfile, setting: Setting, mode: TrainingMode) -> Iterator[Moment]:
    """The moments of a step of Lean's; activations of the profile do not count."""
    buckets = sorted(mode.buckets(profile, setting), key=lambda bucket: bucket.last_index)
    constant = constant_footprint(profile, setting, residual=sum(mode.stored_nbytes(bucket) for bucket in buckets))
    if setting.options.deterministic:  # else an owner sums in the slot
        constant = constant.plus(workspace=owner_sums_nbytes(buckets, setting, mode))
    of_index = {index: bucket for bucket in buckets for index in bucket.indices}
    slots, waiting, previous = _Slots(mode, setting), 0, NO_MESSAGES
    for index, gradient in enumerate(profile.gradients):
        yield Moment(constant.plus(until_gradient(gradient.name), **slots.with_more(waiting)), index)
        bucket = of_index[index]
        if bucket.last_index == index:
            slots.take(bucket)
            at = exchange_of(gradient)
            yield Moment(constant.plus(at, **slots.with_more(waiting, **previous)), index, ready=True)
            if not mode.sums_in_place(bucket):  # its gradients have moved to the slot
                waiting -= sum(profile.gradients[i].nbytes for i in bucket.indices if i != index)
            messages, *rarely = exchange_nbytes(bucket, setting, mode)
            step = {**NO_MESSAGES, "workspace": 0 if setting.clips else _step_nbytes(profile, bucket)}
            for more in (messages, *rarely, step):
                held = slots.with_more(waiting, **_together(previous, more))
                yield Moment(constant.plus(at, **held), index, ready=True)
            previous = messages
        elif not mode.sums_in_place(bucket):
            waiting += gradient.nbytes
    whole = max(bucket.nbytes for bucket in buckets) if setting.clips and mode.keeps_residual else 0
    workspace = max(_step_nbytes(profile, bucket) for bucket in buckets)
    end = constant.plus("a bucket's step", **slots.with_more(whole, workspace=workspace))
    yield Moment(end, len(profile.gradients))


def _lean(profile: StepProfile, setting: Setting, mode: TrainingMode) -> Iterator[Footprint]:
    for moment in lean_moments(profile, setting, mode):
        use = profile.after_backward
        if moment.index < len(profile.gradients):
            gradient = profile.gradients[moment.index]
            use = gradient.when_ready if moment.ready else gradient.peak_before
        yield moment.footprint.plus_use(moment.footprint.at, use)


def residual_nbytes(profile: StepProfile, setting: Setting, mode: TrainingMode) -> int:
    """Bytes of all residuals between exchanges."""
    return sum(mode.stored_nbytes(bucket) for bucket in mode.buckets(profile, setting))


def _step_nbytes(profile: StepProfile, bucket: BucketSize) -> int:
    """Workspace of the optimizer's step of one bucket."""
    return int(bucket.nbytes / max(1, profile.gradients_nbytes) * profile.optimizer.workspace_nbytes)


def exchange_nbytes(bucket: BucketSize, setting: Setting, mode: TrainingMode) -> list[Mapping[str, int]]:
    """Return the bytes by kind that the exchange of a bucket needs: in a usual step, then at rarer moments."""
    if not bucket.compressed:
        return [NO_MESSAGES]
    storing = [{**NO_MESSAGES, "workspace": mode.stored_nbytes(bucket)}] if mode.residuals in STORED else []
    if mode.exchange == OKTOPK:
        return [*_sparse_nbytes(bucket, setting), *storing]
    return [quantised_nbytes(mode.kind, bucket.numel, setting.ranks, mode.keeps_residual), *storing]


def quantised_nbytes(kind: str, numel: int, ranks: int, keeps_residual: bool) -> dict[str, int]:
    """Return the bytes by kind that a quantised exchange of a bucket needs at its end, when nothing is freed yet.

    It sends messages to all owners and one as owner, and receives as many of each from all. With a residual an owner
    holds the errors of its own rounding. Left out: a copy of the scales of all averages, at most 1/17 of them.
    """
    form = FORMATS[kind]
    region = form.region_numel(numel, ranks)
    message_nbytes = form.message_nbytes(region)
    return {
        "send": (ranks + 1) * message_nbytes,
        "receive": 2 * ranks * message_nbytes,
        "workspace": FLOAT_NBYTES * region if keeps_residual else 0,
    }


def _sparse_nbytes(bucket: BucketSize, setting: Setting) -> tuple[dict[str, int], dict[str, int]]:
    """Return what an exchange of fixed-size messages needs: in a usual step, and while it balances regions."""
    ranks = setting.ranks
    sizes = Sizes.of(bucket.numel, ranks, setting.density, setting.options)
    send = (ranks + 1) * sizes.message_nbytes
    sums = 2 * FLOAT_NBYTES * ranks * sizes.capacity
    # Packed messages are unpacked into rows of pairs, to every rank and from it.
    rows = PAIR_NBYTES * (3 * ranks + 1) * sizes.capacity if sizes.encoding.rounds else 0
    as_float32 = FLOAT_NBYTES * bucket.numel
    gradients_copy = as_float32 if bucket.nbytes < as_float32 else 0
    workspace = sums + rows + gradients_copy
    usual = {"send": send, "receive": 2 * ranks * sizes.message_nbytes, "workspace": workspace}
    # Chunk by chunk: residual plus gradient, then what passes the threshold as bytes and as counts of two widths.
    balancing = 0 if sizes.selects_all else (4 + 1 + 4 + 8) * min(bucket.numel, CHUNK_NUMEL)
    return usual, {"send": send, "receive": 0, "workspace": balancing + gradients_copy}


def owner_sums_nbytes(buckets: Sequence[BucketSize], setting: Setting, mode: TrainingMode) -> int:
    """Bytes of the buffer in which a region's owner sums: all buckets share one, for the widest region."""
    if mode.exchange != OKTOPK:  # owners of quantised regions sum in registers
        return 0
    widest = (widest_numel(bucket.numel, setting.ranks) for bucket in buckets if bucket.compressed)
    return max((FLOAT_NBYTES * numel for numel in widest), default=0)
