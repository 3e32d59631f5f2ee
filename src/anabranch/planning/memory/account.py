"""Predicts peak memory by kind of object for every mode of training: the arithmetic on what ``probe.py`` found.

    ddp             weights n, gradients n (views of buckets), optimizer state
    naive sparse    weights n, gradients n, residual n; after backward a flat copy of all gradients, its magnitudes, an
                    all-gather of 2kP words and a decompressed update: n each, but for the second last
    oktopk          ddp, a residual, an owner's sums for every bucket, messages of fixed size
    bf16, int8      ddp, messages with all values of a bucket, an owner's rounding errors
    int4            the same, and a residual
    auto            as int4, which it may choose for every bucket
    lean, dense     weights n, slots: a bucket's gradients from when it is complete until it is updated, two at a time
    lean            weights n, residual n, which is also where gradients add up, slots
    lean, host      weights n, slots, and those of the two largest neighbours: the residual is in host memory
    lean, residuals bf16 (int8)   weights n, residual n/2 (n/4), slots, two more for residuals in float32
    lean, int8      weights n, slots, the messages of int8; other kinds alike
    fsdp2           shards of weights, gradients and state; gathered weights and whole gradients, unit by unit
    hsdp            the same with shards as large as a node's ranks make them; averages between nodes are in place
    hsdp@int8       hsdp, and messages of int8 with all values of a unit's shard; hsdp@int4, hsdp@oktopk:0.01: and a
                    residual as large as the shards

With ``clips`` averages under Lean are held until the end of backward.

A peak is the highest of many moments: each part of backward between two gradients, each bucket's exchange, and the
optimizer's step. Not counted: what NCCL and the CUDA context take, which torch's allocator does not see, and
fragmentation of its memory.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, cast

from anabranch.fsdp.planning.step import REST, held_at, host_order
from anabranch.fsdp.planning.ways import RESHARD, UNPLANNED, ShardedWay, way_of
from anabranch.planning.memory.slots import SLOTS, ring_nbytes
from anabranch.planning.memory.step_profile import (
    BucketSize,
    MemoryUse,
    ReadyGradient,
    StepProfile,
    buckets_by_names,
    buckets_by_size,
)
from anabranch.planning.quantised_prices import Region
from anabranch.tools.predict.scaling.compression import AUTO
from anabranch.tools.predict.scaling.sharding import block_of
from anabranch.values.kinds.fidelity import LEAST
from anabranch.values.kinds.formats import CHUNK_NUMEL, STORED, Sizes, widest_numel
from anabranch.values.kinds.names import COMPRESSED, DENSE, density_of
from anabranch.values.kinds.options import OkTopk, Quantised

KINDS = ("weights", "gradients", "residual", "optimizer state", "activations", "send", "receive", "workspace")
DDP, LEAN_DENSE, NAIVE, OKTOPK, LEAN, LEAN_HOST, LEAN_BF16, LEAN_INT8 = MODES = (
    "ddp", "lean, dense", "naive sparse", "oktopk", "lean", "lean, host",
    "lean, residuals bf16", "lean, residuals int8",
)  # fmt: skip
FRAGMENTATION = 0.05  # share of the memory that torch's allocator holds in pieces too small to use
BUCKET_NBYTES = 25 * 2**20  # DDP's own
BLAS_WORKSPACE_NBYTES = 2 * 32 * 2**20  # cuBLAS's on an H100 or H200: one for the thread of forward, one for backward's
PAIR_NBYTES = 8  # a float32 value and its int32 position
FLOAT_NBYTES = 4
NO_MESSAGES: Mapping[str, int] = {"send": 0, "receive": 0, "workspace": 0}
ROUNDED = (*COMPRESSED, AUTO)
WITH_RESIDUAL = [kind for kind in ROUNDED if Quantised(LEAST if kind == AUTO else kind).keeps_residual]

ResidualPlacement = Literal["in place", "host", "bf16", "int8"]


class Way(NamedTuple):
    """How a mode other than DDP and naive sparse trains: by which exchange, on Lean, with residuals stored how."""

    exchange: str
    lean: bool = False
    residuals: ResidualPlacement = "in place"
    rounding_errors: bool | None = None  # whether an exchange that rounds keeps them; None: as it does by itself

    @property
    def keeps_residual(self) -> bool:
        """Whether what is not sent in a step is kept for the next one."""
        by_itself = self.exchange == OKTOPK or self.exchange in WITH_RESIDUAL
        return by_itself if self.rounding_errors is None else self.rounding_errors

    def compresses(self, gradient: ReadyGradient) -> bool:
        """Whether this gradient may be in a bucket that is compressed: rounding also takes vectors and half floats."""
        if self.exchange == OKTOPK:
            return gradient.sparse
        return self.exchange != DENSE and not gradient.wide

    def adds_up_in_place(self, bucket: BucketSize) -> bool:
        """Whether this bucket's gradients are added to its residual one by one; else they wait for the others."""
        return self.residuals == "in place" and bucket.compressed and self.keeps_residual

    def stored_nbytes(self, bucket: BucketSize) -> int:
        """Bytes of this bucket's residual between exchanges, on the device or on the host; 0 if it has none."""
        if not (bucket.compressed and self.keeps_residual):
            return 0
        if (form := STORED.get(self.residuals)) is None:
            return FLOAT_NBYTES * bucket.numel
        return form.message_nbytes(form.region_numel(bucket.numel, 1))


WAYS: Mapping[str, Way] = {
    LEAN_DENSE: Way(DENSE, lean=True),
    OKTOPK: Way(OKTOPK),
    LEAN: Way(OKTOPK, lean=True),
    LEAN_HOST: Way(OKTOPK, lean=True, residuals="host"),
    LEAN_BF16: Way(OKTOPK, lean=True, residuals="bf16"),
    LEAN_INT8: Way(OKTOPK, lean=True, residuals="int8"),
    **{kind: Way(kind) for kind in ROUNDED},
    **{f"{LEAN}, {kind}": Way(kind, lean=True) for kind in ROUNDED},
    **{f"{LEAN}, {kind}, host": Way(kind, lean=True, residuals="host") for kind in WITH_RESIDUAL},
    **{
        f"{LEAN}, {kind}, residuals {how}": Way(kind, lean=True, residuals=cast(ResidualPlacement, how))
        for kind in WITH_RESIDUAL
        for how in STORED
    },
}


def modes_of(exchange: str) -> list[str]:
    """The modes of one exchange, "oktopk", "dense", "auto" or a kind that rounds: in DataParallel, then on Lean."""
    return [mode for mode, way in WAYS.items() if way.exchange == exchange]


def is_sharded(mode: str) -> bool:
    """Whether this mode shards the model, in units that are not planned."""
    return mode.partition("@")[0] in UNPLANNED


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
    clips                   whether gradients are clipped by their norm: then Lean holds averages until backward ends
    window_nbytes           how much of Lean's offloaded activations may be on its way to the host, or back early
    blas_workspace_nbytes   what cuBLAS keeps for itself
    ranks_per_node          among which HSDP shards the model; None: all ranks are in one node
    """

    ranks: int = 4
    density: float = 0.01
    buckets: Sequence[Sequence[str]] | None = None
    clips: bool = False
    window_nbytes: int = 0
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


def predict(profile: StepProfile, mode: str | Way, setting: Setting | None = None) -> Footprint:
    """Return the footprint at the moment of a step when most memory is in use, in a mode above or in a way."""
    return max(_moments(profile, mode, setting or Setting()), key=lambda footprint: footprint.nbytes)


def _moments(profile: StepProfile, mode: str | Way, setting: Setting) -> Iterator[Footprint]:
    if isinstance(mode, Way):
        return _lean(profile, setting, mode) if mode.lean else _data_parallel(profile, setting, mode)
    if mode == DDP:
        return _ddp(profile, setting)
    if mode == NAIVE:
        return _naive(profile, setting)
    if is_sharded(mode):
        return _fsdp2(profile, setting, way_of(mode, UNPLANNED))
    if mode not in WAYS:
        raise ValueError(f"mode is {mode!r}: expected one of {', '.join([DDP, NAIVE, *WAYS, *UNPLANNED])}")
    return _moments(profile, WAYS[mode], setting)


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
    wide = max(n, FLOAT_NBYTES * profile.numel)  # what is exchanged is in float32, whatever gradients are
    always = _always(profile, setting, residual=wide)
    ready_nbytes = 0
    for gradient in profile.gradients:  # gradients stay where autograd puts them
        yield always.plus_use(_before(gradient.name), gradient.peak_before, gradients=ready_nbytes)
        ready_nbytes += gradient.nbytes
    k = max(1, round(setting.density * profile.numel))
    after = always.plus_use("exchange", profile.after_backward, gradients=n)
    # A flat copy of all gradients, to which the residual is added; its magnitudes; values and int64 positions of k.
    yield after.plus("selection", workspace=2 * wide + 12 * k)
    gathered = PAIR_NBYTES * k * setting.ranks
    yield after.plus("decompression", workspace=2 * wide, send=PAIR_NBYTES * k, receive=gathered)
    yield _optimizer_step(profile, always.plus(gradients=n))


def _data_parallel(profile: StepProfile, setting: Setting, way: Way) -> Iterator[Footprint]:
    buckets = _buckets(profile, setting, way)
    residual = sum(way.stored_nbytes(bucket) for bucket in buckets)
    always = _always(profile, setting, gradients=profile.gradients_nbytes, residual=residual)
    always = always.plus(workspace=_owner_sums_nbytes(buckets, setting, way))
    yield from _backward(profile, always)
    yield from _exchanges(profile, setting, buckets, always, way)
    yield _optimizer_step(profile, always)


class _Slots:
    """What Lean holds of the buckets that are complete, at one moment of a step."""

    def __init__(self, way: Way, setting: Setting) -> None:
        self._way = way
        self._setting = setting
        self._latest: deque[tuple[int, int]] = deque(maxlen=SLOTS)  # slots of gradients, and of residuals in float32
        self._held_nbytes = 0

    def take(self, bucket: BucketSize) -> None:
        """The next bucket is complete: the oldest slot is freed, unless averages are held."""
        with_residual = bucket.compressed and self._way.keeps_residual
        if self._setting.clips and not with_residual:
            self._held_nbytes += bucket.nbytes
            return
        wide = FLOAT_NBYTES * bucket.numel if with_residual and self._way.residuals in STORED else 0
        self._latest.append((bucket.nbytes, wide))
        if self._setting.clips:  # of a sparse average its values that are not 0
            pairs = int(self._setting.density * bucket.numel) * PAIR_NBYTES
            self._held_nbytes += min(bucket.nbytes, pairs) if self._way.exchange == OKTOPK else bucket.nbytes

    def beside(self, gradients: int, **more: int) -> dict[str, int]:
        """Bytes by kind: all slots, and ``gradients`` and more beside them."""
        slots, wide = (sum(sizes) for sizes in zip(*self._latest, strict=True)) if self._latest else (0, 0)
        return {"gradients": gradients + self._held_nbytes + slots, "residual": wide, **more}


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of Lean's step.

    beside   what is in memory beside what the step itself uses then
    index    of the gradient that is computed until then, or is ready; the number of gradients: backward is over
    ready    whether it is ready
    """

    beside: Footprint
    index: int
    ready: bool = False


def lean_moments(profile: StepProfile, setting: Setting, way: Way) -> Iterator[Moment]:
    """The moments of a step of Lean's; activations of the profile do not count."""
    buckets = sorted(_buckets(profile, setting, way), key=lambda bucket: bucket.last_index)
    always = _always_of_lean(profile, setting, way, buckets)
    of_index = {index: bucket for bucket in buckets for index in bucket.indices}
    slots, waiting, before = _Slots(way, setting), 0, NO_MESSAGES
    for index, gradient in enumerate(profile.gradients):
        yield Moment(always.plus(_before(gradient.name), **slots.beside(waiting)), index)
        for bucket in (bucket for bucket in buckets if bucket.last_index == index):
            slots.take(bucket)
            at = f"exchange of the bucket to {gradient.name}"
            yield Moment(always.plus(at, **slots.beside(waiting, **before)), index, ready=True)
            if not way.adds_up_in_place(bucket):  # they have moved to the slot
                waiting -= sum(profile.gradients[i].nbytes for i in bucket.indices if i != index)
            messages, *rarely = _messages(bucket, setting, way)
            step = {**NO_MESSAGES, "workspace": 0 if setting.clips else _step_nbytes(profile, bucket)}
            for more in (messages, *rarely, step):
                together = {kind: before[kind] + more[kind] for kind in before}
                yield Moment(always.plus(at, **slots.beside(waiting, **together)), index, ready=True)
            before = messages
        if of_index[index].last_index != index and not way.adds_up_in_place(of_index[index]):
            waiting += gradient.nbytes
    whole = max(bucket.nbytes for bucket in buckets) if setting.clips and way.keeps_residual else 0
    workspace = max(_step_nbytes(profile, bucket) for bucket in buckets)
    yield Moment(always.plus("a bucket's step", **slots.beside(whole, workspace=workspace)), len(profile.gradients))


def _lean(profile: StepProfile, setting: Setting, way: Way) -> Iterator[Footprint]:
    copies_nbytes = min(profile.offloaded_nbytes, setting.window_nbytes)
    for moment in lean_moments(profile, setting, way):
        if moment.index == len(profile.gradients):
            yield moment.beside.plus_use(moment.beside.at, profile.after_backward)
        else:
            gradient = profile.gradients[moment.index]
            use = gradient.when_ready if moment.ready else gradient.peak_before
            yield moment.beside.plus_use(moment.beside.at, use, activations=copies_nbytes)


def residual_nbytes(profile: StepProfile, setting: Setting, way: Way) -> int:
    """Bytes of all residuals between exchanges, on the device or on the host."""
    return sum(nbytes for _, nbytes in residuals_by_bucket(profile, setting, way))


def residuals_by_bucket(profile: StepProfile, setting: Setting, way: Way) -> list[tuple[int, int]]:
    """For each bucket with a residual, in the order of backward: its last gradient, and bytes between exchanges."""
    found = ((bucket.last_index, way.stored_nbytes(bucket)) for bucket in _buckets(profile, setting, way))
    return sorted((last_index, nbytes) for last_index, nbytes in found if nbytes)


def _always_of_lean(profile: StepProfile, setting: Setting, way: Way, buckets: Sequence[BucketSize]) -> Footprint:
    """Return what Lean has in memory during the whole step, residuals included."""
    stored = [way.stored_nbytes(bucket) for bucket in buckets]
    kept, on_host = [nbytes for nbytes in stored if nbytes], way.residuals == "host"
    always = _always(profile, setting, residual=ring_nbytes(kept) if on_host else sum(stored))
    if setting.options.deterministic:  # else an owner adds its sums up in the slot
        always = always.plus(workspace=_owner_sums_nbytes(buckets, setting, way))
    return Footprint(always.kinds, "", sum(stored)) if on_host else always


def _step_nbytes(profile: StepProfile, bucket: BucketSize) -> int:
    """What the optimizer's step of one bucket needs beside its state."""
    return int(bucket.nbytes / max(1, profile.gradients_nbytes) * profile.optimizer.workspace_nbytes)


def _fsdp2(profile: StepProfile, setting: Setting, sharded: ShardedWay) -> Iterator[Footprint]:
    """Units are blocks by the names of their parameters. Gradients count as shards during the whole step."""
    ranks = setting.ranks_per_node or setting.ranks if sharded.nodes else setting.ranks
    between = _Between(
        profile, replace(setting, ranks=setting.ranks // ranks, ranks_per_node=None), sharded.exchange, ranks
    )
    always = _always(profile, setting, workspace=between.workspace_nbytes)
    shards = {**{kind: always.kinds[kind] // ranks for kind in ("weights", "optimizer state")},
              "gradients": profile.gradients_nbytes // ranks, "residual": between.residual_nbytes,
              "workspace": always.kinds["workspace"]}  # fmt: skip
    always = Footprint(shards, "")
    last = {block_of(gradient.name): index for index, gradient in enumerate(profile.gradients)}
    blocks = [block for block in sorted(last, key=lambda block: last[block], reverse=True) if block]
    nbytes = dict.fromkeys([*blocks, ""], 0)
    for gradient in profile.gradients:
        nbytes[block_of(gradient.name)] += gradient.nbytes
    sizes = [(nbytes[block], nbytes[block]) for block in (*blocks, "")]
    begun = 0  # the first gradient of the backward that comes next
    for (kind, unit), held in held_at(sizes, host_order([sharded.units == RESHARD] * len(blocks), 1)):
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
            for more in between.messages(blocks[unit]):
                together = {kind: gathered.get(kind, 0) + more.get(kind, 0) for kind in (*gathered, *more)}
                yield always.plus_use(f"reduction of {blocks[unit]}", use, gradients=held.gradients, **together)
    rest, buffer = nbytes[""], sizes[0][1] if blocks else 0  # gathered for the whole step; of the last reduction
    for gradient in profile.gradients[begun:]:
        more = {"weights": rest, "gradients": rest - gradient.nbytes, "send": buffer}
        yield always.plus_use(_before(gradient.name), gradient.peak_before, **more)
    for more in between.messages(""):
        together = {"gradients": rest, **more, "send": rest + more.get("send", 0)}
        yield always.plus_use("reduction of the rest", _without_gradients(profile.after_backward), **together)
    workspace = profile.optimizer.workspace_nbytes // ranks
    yield always.plus_use("optimizer step", profile.after_backward, workspace=workspace)


class _Between:
    """What an exchange of shards between nodes needs; nothing if it is dense, and made in place.

    ``setting`` has as many ranks as there are nodes. Each of the ``inside`` ranks of a node has a part of every unit.
    """

    def __init__(self, profile: StepProfile, setting: Setting, exchange: str, inside: int) -> None:
        density = density_of(exchange)
        self._way = Way(exchange if density is None else OKTOPK)
        self._setting = setting if density is None else replace(setting, density=density)
        units: dict[str, list[ReadyGradient]] = {}
        for gradient in profile.gradients:
            units.setdefault(block_of(gradient.name), []).append(gradient)
        self._shards = {unit: self._shard(gradients, inside) for unit, gradients in units.items()}
        buckets = [bucket for bucket, _ in self._shards.values()]
        self.residual_nbytes = sum(self._way.stored_nbytes(bucket) for bucket in buckets)
        self.workspace_nbytes = _owner_sums_nbytes(buckets, self._setting, self._way)

    def messages(self, unit: str) -> list[Mapping[str, int]]:
        """Bytes by kind while a unit's shard is exchanged: in a usual step, then at rarer moments."""
        bucket, copied_nbytes = self._shards.get(unit, (BucketSize((), 0, 0, False), 0))
        found = _messages(bucket, self._setting, self._way)
        return [{**more, "workspace": more["workspace"] + copied_nbytes} for more in found]

    def _shard(self, gradients: Sequence[ReadyGradient], inside: int) -> tuple[BucketSize, int]:
        """This rank's part of a unit that is compressed, and the bytes of copies where some of the unit is not."""
        some = [gradient for gradient in gradients if self._way.compresses(gradient)]
        numel, nbytes = (-(-sum(sizes) // inside) for sizes in ((g.numel for g in some), (g.nbytes for g in some)))
        mixed = bool(some) and len(some) < len(gradients)
        copied_nbytes = -(-sum(gradient.nbytes for gradient in gradients) // inside) if mixed else 0
        return BucketSize((), numel, nbytes, bool(some)), copied_nbytes


def _without_gradients(use: MemoryUse) -> MemoryUse:
    return use._replace(gradients=0)


def _before(name: str) -> str:
    return f"until the gradient of {name}"


def _backward(profile: StepProfile, always: Footprint) -> Iterator[Footprint]:
    """The peak before each gradient."""
    for gradient in profile.gradients:
        yield always.plus_use(_before(gradient.name), gradient.peak_before)


def _optimizer_step(profile: StepProfile, always: Footprint) -> Footprint:
    return always.plus_use("optimizer step", profile.after_backward, workspace=profile.optimizer.workspace_nbytes)


def _exchanges(
    profile: StepProfile, setting: Setting, buckets: Sequence[BucketSize], always: Footprint, way: Way
) -> Iterator[Footprint]:
    """The moments when each compressed bucket is complete; the messages of the bucket before are still in memory."""
    before = NO_MESSAGES
    for bucket in sorted((bucket for bucket in buckets if bucket.compressed), key=lambda bucket: bucket.last_index):
        gradient = profile.gradients[bucket.last_index]
        messages, *rarely = _messages(bucket, setting, way)
        for own in (messages, *rarely):
            together = {kind: before[kind] + own[kind] for kind in before}
            yield always.plus_use(f"exchange of the bucket to {gradient.name}", gradient.when_ready, **together)
        before = messages


def _messages(bucket: BucketSize, setting: Setting, way: Way) -> list[Mapping[str, int]]:
    """Return what the exchange of a bucket needs beside its slots: in a usual step, then at rarer moments."""
    if not bucket.compressed:
        return [NO_MESSAGES]
    storing = [{**NO_MESSAGES, "workspace": way.stored_nbytes(bucket)}] if way.residuals in STORED else []
    if way.exchange == OKTOPK:
        return [*_sparse_messages(bucket, setting), *storing]
    kind = LEAST if way.exchange == AUTO else way.exchange
    return [quantised_messages(kind, bucket.numel, setting.ranks, way.keeps_residual), *storing]


def quantised_messages(kind: str, numel: int, ranks: int, keeps_residual: bool) -> dict[str, int]:
    """Return what a quantised exchange of a bucket needs at its end, when nothing of it is freed yet.

    It sends messages to all owners and one as owner, and receives as many of each from all. With a residual an owner
    holds the errors of its own rounding. Left out: a copy of the scales of all averages, at most 1/17 of them.
    """
    region = Region.of(kind, numel, ranks)
    return {
        "send": (ranks + 1) * region.message_nbytes,
        "receive": 2 * ranks * region.message_nbytes,
        "workspace": FLOAT_NBYTES * region.numel if keeps_residual else 0,
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


def _owner_sums_nbytes(buckets: Sequence[BucketSize], setting: Setting, way: Way) -> int:
    """Bytes of the buffer in which a region's owner sums: all buckets share one, for the widest region."""
    if way.exchange != OKTOPK:  # owners of quantised regions sum in registers
        return 0
    widest = (widest_numel(bucket.numel, setting.ranks) for bucket in buckets if bucket.compressed)
    return max((FLOAT_NBYTES * numel for numel in widest), default=0)


def _buckets(profile: StepProfile, setting: Setting, way: Way) -> list[BucketSize]:
    """Return the buckets that a mode exchanges."""
    if setting.buckets is None:
        return buckets_by_size(profile, BUCKET_NBYTES, way.compresses)
    return buckets_by_names(profile, setting.buckets, way.compresses)
