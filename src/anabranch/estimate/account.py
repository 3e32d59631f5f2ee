"""Predicts peak memory by kind of object for every mode of training: the arithmetic on what ``probe.py`` found.

    ddp             weights n, gradients n (views of buckets), optimizer state
    naive sparse    weights n, gradients n, residual n; after backward a flat copy of all gradients, its magnitudes, an
                    all-gather of 2kP words and a decompressed update: n each, but for the second last
    oktopk          ddp, a residual, an owner's sums for every bucket, messages of fixed size
    bf16, int8      ddp, messages with all values of a bucket, an owner's rounding errors
    int4            the same, and a residual
    lean            weights n, residual n, which is also where gradients add up, two slots of the largest bucket
    lean, host      weights n, four slots: the residual is in host memory
    lean, int8      weights n, two slots, the messages of int8; other kinds alike
    fsdp2           shards of weights, gradients and state; gathered weights and whole gradients, unit by unit

A peak is the highest of many moments: each part of backward between two gradients, each bucket's exchange, and the
optimizer's step. Not counted: what NCCL and the CUDA context take, which torch's allocator does not see, and
fragmentation of its memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.estimate.step_profile import (
    BucketSize,
    MemoryUse,
    ReadyGradient,
    StepProfile,
    buckets_by_names,
    buckets_by_size,
)
from anabranch.kinds import COMPRESSED
from anabranch.lean.slots import SLOTS
from anabranch.quantised.cost_model import Region
from anabranch.quantised.options import Quantised
from anabranch.scaling.sharding import block_of
from anabranch.sharded.step import REST, held_at, host_order
from anabranch.sparse.options import OkTopk
from anabranch.sparse.select import CHUNK_NUMEL
from anabranch.sparse.sizes import Sizes, widest_numel

KINDS = ("weights", "gradients", "residual", "optimizer state", "activations", "send", "receive", "workspace")
DDP, NAIVE, OKTOPK, LEAN, LEAN_HOST = MODES = ("ddp", "naive sparse", "oktopk", "lean", "lean, host")
FSDP2, FSDP2_RESHARD = SHARDED_MODES = ("fsdp2", "fsdp2:reshard")  # a unit per block, kept or freed after forward
BUCKET_NBYTES = 25 * 2**20  # DDP's own
BLAS_WORKSPACE_NBYTES = 2 * 32 * 2**20  # cuBLAS's on an H100 or H200: one for the thread of forward, one for backward's
PAIR_NBYTES = 8  # a float32 value and its int32 position
FLOAT_NBYTES = 4
WITH_RESIDUAL = [kind for kind in COMPRESSED if Quantised(kind).keeps_residual]


class Way(NamedTuple):
    """How a mode other than DDP and naive sparse trains: by which exchange, on Lean, with residuals on the host."""

    exchange: str
    lean: bool = False
    host: bool = False

    @property
    def keeps_residual(self) -> bool:
        """Whether what is not sent in a step is kept for the next one."""
        return self.exchange == OKTOPK or self.exchange in WITH_RESIDUAL

    def compresses(self, gradient: ReadyGradient) -> bool:
        """Whether this gradient may be in a bucket that is compressed: rounding also takes vectors and half floats."""
        return gradient.sparse if self.exchange == OKTOPK else not gradient.wide


WAYS: Mapping[str, Way] = {
    OKTOPK: Way(OKTOPK),
    LEAN: Way(OKTOPK, lean=True),
    LEAN_HOST: Way(OKTOPK, lean=True, host=True),
    **{kind: Way(kind) for kind in COMPRESSED},
    **{f"{LEAN}, {kind}": Way(kind, lean=True) for kind in COMPRESSED},
    **{f"{LEAN}, {kind}, host": Way(kind, lean=True, host=True) for kind in WITH_RESIDUAL},
}


def modes_of(exchange: str) -> list[str]:
    """The modes of one exchange, "oktopk" or a kind that rounds: in DataParallel, then on Lean."""
    return [mode for mode, way in WAYS.items() if way.exchange == exchange]


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
    """Return the footprint at the moment of a step when most memory is in use, in one of the modes above."""
    return max(_moments(profile, mode, setting or Setting()), key=lambda footprint: footprint.nbytes)


def _moments(profile: StepProfile, mode: str, setting: Setting) -> Iterator[Footprint]:
    if mode == DDP:
        return _ddp(profile, setting)
    if mode == NAIVE:
        return _naive(profile, setting)
    if mode in SHARDED_MODES:
        return _fsdp2(profile, setting, mode == FSDP2_RESHARD)
    if mode not in WAYS:
        raise ValueError(f"mode is {mode!r}: expected one of {', '.join([DDP, NAIVE, *WAYS, *SHARDED_MODES])}")
    way = WAYS[mode]
    return _lean(profile, setting, way) if way.lean else _data_parallel(profile, setting, way)


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


def _data_parallel(profile: StepProfile, setting: Setting, way: Way) -> Iterator[Footprint]:
    buckets = _buckets(profile, setting, way)
    residual = sum(_residuals_nbytes(buckets, way))
    always = _always(profile, setting, gradients=profile.gradients_nbytes, residual=residual)
    always = always.plus(workspace=_owner_sums_nbytes(buckets, setting, way))
    yield from _backward(profile, always)
    yield from _exchanges(profile, setting, buckets, always, way)
    yield _optimizer_step(profile, always)


def _lean(profile: StepProfile, setting: Setting, way: Way) -> Iterator[Footprint]:
    buckets = _buckets(profile, setting, way)
    largest = max(bucket.nbytes for bucket in buckets)
    residuals = _residuals_nbytes(buckets, way)
    on_device = SLOTS * max(residuals, default=0) if way.host else sum(residuals)
    always = _always(profile, setting, gradients=SLOTS * largest, residual=on_device)
    if setting.options.deterministic:  # else an owner adds its sums up in the slot
        always = always.plus(workspace=_owner_sums_nbytes(buckets, setting, way))
    if way.host:
        always = Footprint(always.kinds, "", sum(residuals))
    incomplete = [bucket for bucket in buckets if not (bucket.compressed and way.keeps_residual)]
    yield from _backward(profile, always, _incomplete_nbytes(profile, incomplete))
    yield from _exchanges(profile, setting, buckets, always, way)
    share = largest / max(1, profile.gradients_nbytes)  # each bucket has a step of its own
    workspace = int(share * profile.optimizer.workspace_nbytes)
    yield always.plus_use("a bucket's step", profile.after_backward, workspace=workspace)


def _fsdp2(profile: StepProfile, setting: Setting, reshard: bool) -> Iterator[Footprint]:
    """Units are blocks by the names of their parameters. Gradients count as shards during the whole step."""
    ranks, always = setting.ranks, _always(profile, setting)
    shards = {**{kind: always.kinds[kind] // ranks for kind in ("weights", "optimizer state")},
              "gradients": profile.gradients_nbytes // ranks, "workspace": always.kinds["workspace"]}  # fmt: skip
    always = Footprint(shards, "")
    last = {block_of(gradient.name): index for index, gradient in enumerate(profile.gradients)}
    blocks = [block for block in sorted(last, key=lambda block: last[block], reverse=True) if block]
    nbytes = dict.fromkeys([*blocks, ""], 0)
    for gradient in profile.gradients:
        nbytes[block_of(gradient.name)] += gradient.nbytes
    sizes = [(nbytes[block], nbytes[block]) for block in (*blocks, "")]
    begun = 0  # the first gradient of the backward that comes next
    for (kind, unit), held in held_at(sizes, host_order([reshard] * len(blocks), 1)):
        gathered = {"weights": held.parameters, "send": held.reducing, "receive": held.gathering}
        if kind == "forward" and unit == len(blocks) - 1:  # the last one; REST where there is no block
            yield always.plus_use("end of forward", _without_gradients(profile.gradients[0].peak_before), **gathered)
        elif kind == "backward":
            end = last[blocks[unit]] + 1
            waiting = held.gradients - sizes[unit][1]
            for gradient in profile.gradients[begun:end]:
                yield always.plus_use(_before(gradient.name), gradient.peak_before, gradients=waiting, **gathered)
                waiting += gradient.nbytes if block_of(gradient.name) else 0
            begun = end
        elif kind == "reduce" and unit != REST:
            use = _without_gradients(profile.gradients[begun - 1].when_ready)
            yield always.plus_use(f"reduction of {blocks[unit]}", use, gradients=held.gradients, **gathered)
    rest, buffer = nbytes[""], sizes[0][1] if blocks else 0  # gathered for the whole step; of the last reduction
    for gradient in profile.gradients[begun:]:
        more = {"weights": rest, "gradients": rest - gradient.nbytes, "send": buffer}
        yield always.plus_use(_before(gradient.name), gradient.peak_before, **more)
    yield always.plus_use(
        "reduction of the rest", _without_gradients(profile.after_backward), gradients=rest, send=rest
    )
    workspace = profile.optimizer.workspace_nbytes // ranks
    yield always.plus_use("optimizer step", profile.after_backward, workspace=workspace)


def _without_gradients(use: MemoryUse) -> MemoryUse:
    return use._replace(gradients=0)


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
    profile: StepProfile, setting: Setting, buckets: Sequence[BucketSize], always: Footprint, way: Way
) -> Iterator[Footprint]:
    """The moments when each compressed bucket is complete; the messages of the bucket before are still in memory."""
    before = {"send": 0, "receive": 0, "workspace": 0}
    for bucket in sorted((bucket for bucket in buckets if bucket.compressed), key=lambda bucket: bucket.last_index):
        gradient = profile.gradients[bucket.last_index]
        if way.exchange == OKTOPK:
            messages, *rarely = _sparse_messages(bucket, setting)
        else:
            messages, rarely = quantised_messages(way.exchange, bucket.numel, setting.ranks), []
        for own in (messages, *rarely):
            together = {kind: before[kind] + own[kind] for kind in before}
            yield always.plus_use(f"exchange of the bucket to {gradient.name}", gradient.when_ready, **together)
        before = messages


def quantised_messages(kind: str, numel: int, ranks: int) -> dict[str, int]:
    """Return what a quantised exchange of a bucket needs at its end, when nothing of it is freed yet.

    It sends messages to all owners and one as owner, and receives as many of each from all. With a residual an owner
    holds the errors of its own rounding. Left out: a copy of the scales of all averages, at most 1/17 of them.
    """
    region = Region.of(kind, numel, ranks)
    return {
        "send": (ranks + 1) * region.message_nbytes,
        "receive": 2 * ranks * region.message_nbytes,
        "workspace": FLOAT_NBYTES * region.numel if kind in WITH_RESIDUAL else 0,
    }


def _sparse_messages(bucket: BucketSize, setting: Setting) -> tuple[dict[str, int], dict[str, int]]:
    """Return what an exchange of fixed-size messages needs: in a usual step, and while it balances regions."""
    ranks = setting.ranks
    sizes = Sizes.of(bucket.numel, ranks, setting.density, setting.options)
    send = (ranks + 1) * sizes.message_nbytes
    sums = 2 * 4 * ranks * sizes.capacity
    # Packed messages: beside them rows of pairs, to every rank and from it.
    rows = PAIR_NBYTES * (3 * ranks + 1) * sizes.capacity if sizes.encoding.rounds else 0
    wide = FLOAT_NBYTES * bucket.numel
    in_float32 = wide if bucket.nbytes < wide else 0  # a copy of the gradients
    workspace = sums + rows + in_float32
    usual = {"send": send, "receive": 2 * ranks * sizes.message_nbytes, "workspace": workspace}
    # Chunk by chunk: residual plus gradient, then what passes the threshold as bytes and as counts of two widths.
    balancing = 0 if sizes.selects_all else (4 + 1 + 4 + 8) * min(bucket.numel, CHUNK_NUMEL)
    return usual, {"send": send, "receive": 0, "workspace": balancing + in_float32}


def _residuals_nbytes(buckets: Sequence[BucketSize], way: Way) -> list[int]:
    """Bytes of the residual of each bucket that has one: float32, whatever the gradients are."""
    return [FLOAT_NBYTES * bucket.numel for bucket in buckets if bucket.compressed and way.keeps_residual]


def _owner_sums_nbytes(buckets: Sequence[BucketSize], setting: Setting, way: Way) -> int:
    """Bytes of the buffer in which a region's owner sums: all buckets share one, for the widest region."""
    if way.exchange != OKTOPK:  # owners of quantised regions sum in registers
        return 0
    widest = (widest_numel(bucket.numel, setting.ranks) for bucket in buckets if bucket.compressed)
    return max((FLOAT_NBYTES * numel for numel in widest), default=0)


def _incomplete_nbytes(profile: StepProfile, buckets: Sequence[BucketSize]) -> list[int]:
    """For each gradient, bytes of those buckets that are incomplete before it: their gradients stay where they came."""
    nbytes = [0] * (len(profile.gradients) + 1)
    for bucket in buckets:
        for index in bucket.indices:
            for later in range(index + 1, bucket.last_index + 1):
                nbytes[later] += profile.gradients[index].nbytes
    return nbytes


def _buckets(profile: StepProfile, setting: Setting, way: Way) -> list[BucketSize]:
    """Return the buckets that a mode exchanges."""
    if setting.buckets is None:
        return buckets_by_size(profile, BUCKET_NBYTES, way.compresses)
    return buckets_by_names(profile, setting.buckets, way.compresses)
