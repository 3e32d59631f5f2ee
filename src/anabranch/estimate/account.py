"""Predicted peak memory by kind of object, for every way to train: the arithmetic on what ``probe.py`` found.

    ddp             weights n, gradients n (views of buckets), optimizer state
    naive sparse    weights n, gradients n, residual n; after backward a flat copy of all gradients, its magnitudes, an
                    all-gather of 2kP words and a decompressed update: n each, but for the second last
    oktopk          ddp, a residual, an owner's sums for every bucket, messages of fixed size
    lean            weights n, residual n, which is also where gradients add up, two slots of the largest bucket
    lean, host      weights n, four slots: the residual is in host memory

A peak is the highest of many moments: each stretch of backward between two gradients, each bucket's exchange, and the
optimizer's step. What is not known here: what NCCL and the CUDA context take, which torch's allocator does not see, and
how badly its memory is fragmented.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from anabranch.estimate.profile import BucketSize, Moment, Profile, by_bytes, by_names
from anabranch.sparse.options import OkTopk
from anabranch.sparse.select import CHUNK_NUMEL
from anabranch.sparse.sizes import Sizes, widest_numel

KINDS = ("weights", "gradients", "residual", "optimizer state", "activations", "send", "receive", "workspace")
DDP, NAIVE, OKTOPK, LEAN, LEAN_HOST = MODES = ("ddp", "naive sparse", "oktopk", "lean", "lean, host")
BUCKET_NBYTES = 25 * 2**20  # DDP's own
BLAS_WORKSPACE = 2 * 32 * 2**20  # cuBLAS's on an H100 or H200: one for the thread of forward, one for backward's
SLOTS = 2
PAIR_NBYTES = 8  # a float32 value and its place


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device by kind, at the fullest moment, which ``at`` names; ``host``: pinned bytes beside them."""

    kinds: Mapping[str, int]
    at: str
    host: int = 0

    def __post_init__(self) -> None:
        """Every kind once, in the order of ``KINDS``."""
        if unknown := [kind for kind in self.kinds if kind not in KINDS]:
            raise ValueError(f"a footprint has the kind {unknown[0]!r}: expected some of {', '.join(KINDS)}")
        object.__setattr__(self, "kinds", {kind: int(self.kinds.get(kind, 0)) for kind in KINDS})

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(self.kinds.values())

    def plus(self, at: str, **more: int) -> "Footprint":
        """The same with more of some kinds, at another moment."""
        return Footprint({kind: self.kinds[kind] + more.get(kind, 0) for kind in KINDS}, at, self.host)

    def with_moment(self, at: str, moment: Moment, **more: int) -> "Footprint":
        """The same with what a moment of the step adds."""
        return self.plus(at, **{kind: more.get(kind, 0) + getattr(moment, kind, 0) for kind in KINDS})


@dataclass(frozen=True)
class Setting:
    """How it is trained, beside the mode.

    ranks, density    how many ranks exchange, and what share of a sparse bucket's elements
    buckets           of names, as a plan has them; None: 25 MiB each, in the order of backward
    blas_workspace    what cuBLAS keeps for itself
    """

    ranks: int = 4
    density: float = 0.01
    buckets: Sequence[Sequence[str]] | None = None
    options: OkTopk = field(default_factory=OkTopk)
    blas_workspace: int = BLAS_WORKSPACE

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.ranks < 1:
            raise ValueError(f"ranks is {self.ranks}: expected a whole number from 1 on")
        if not 0 < self.density <= 1:
            raise ValueError(f"density is {self.density}: expected a share of the elements in (0, 1], such as 0.01")


def predict(profile: Profile, mode: str, setting: Setting | None = None) -> Footprint:
    """The fullest moment of a step in this mode, by kind."""
    if mode not in _MOMENTS:
        raise ValueError(f"mode is {mode!r}: expected one of {', '.join(MODES)}")
    return max(_MOMENTS[mode](profile, setting or Setting()), key=lambda footprint: footprint.nbytes)


def _still(profile: Profile, setting: Setting, **kinds: int) -> Footprint:
    """What is there all the time."""
    state = {
        "weights": profile.weights,
        "optimizer state": profile.optimizer.state,
        "workspace": setting.blas_workspace,
    }
    return Footprint(state, "").plus("", **kinds)


def _ddp(profile: Profile, setting: Setting) -> Iterator[Footprint]:
    still = _still(profile, setting, gradients=profile.gradients_nbytes)
    yield from _backward(profile, still)
    yield _optimizer(profile, still)


def _naive(profile: Profile, setting: Setting) -> Iterator[Footprint]:
    n, numel = profile.gradients_nbytes, profile.numel
    still = _still(profile, setting, residual=n)
    here = 0
    for arrival in profile.arrivals:  # gradients stay where autograd puts them
        yield still.with_moment(_until(arrival.name), arrival.highest, gradients=here)
        here += arrival.nbytes
    k = max(1, round(setting.density * numel))
    after = still.with_moment("exchange", profile.after, gradients=n)
    # A flat copy of all gradients, to which the residual is added; its magnitudes; values and int64 places of k.
    yield after.plus("selection", workspace=2 * n + 12 * k)
    gathered = PAIR_NBYTES * k * setting.ranks
    yield after.plus("decompression", workspace=2 * n, send=PAIR_NBYTES * k, receive=gathered)
    yield _optimizer(profile, still.plus("", gradients=n))


def _oktopk(profile: Profile, setting: Setting) -> Iterator[Footprint]:
    buckets = _buckets(profile, setting)
    waiting = sum(bucket.nbytes for bucket in buckets if bucket.sparse)
    still = _still(profile, setting, gradients=profile.gradients_nbytes, residual=waiting)
    still = still.plus("", workspace=_owners(buckets, setting))
    yield from _backward(profile, still)
    yield from _exchanges(profile, setting, buckets, still)
    yield _optimizer(profile, still)


def _lean(profile: Profile, setting: Setting, host: bool = False) -> Iterator[Footprint]:
    buckets = _buckets(profile, setting)
    largest = max(bucket.nbytes for bucket in buckets)
    waiting = sum(bucket.nbytes for bucket in buckets if bucket.sparse)
    widest = max((bucket.nbytes for bucket in buckets if bucket.sparse), default=0)
    still = _still(profile, setting, gradients=SLOTS * largest, residual=SLOTS * widest if host else waiting)
    if setting.options.deterministic:  # else an owner adds its sums up in the slot
        still = still.plus("", workspace=_owners(buckets, setting))
    if host:
        still = Footprint(still.kinds, "", waiting)
    yield from _backward(profile, still, _dense_until(profile, buckets))
    yield from _exchanges(profile, setting, buckets, still)
    share = largest / max(1, profile.gradients_nbytes)  # each bucket has a step of its own
    yield still.with_moment("a bucket's step", profile.after, workspace=int(share * profile.optimizer.workspace))


def _lean_host(profile: Profile, setting: Setting) -> Iterator[Footprint]:
    yield from _lean(profile, setting, host=True)


_MOMENTS: Mapping[str, Callable[[Profile, Setting], Iterator[Footprint]]] = {
    DDP: _ddp, NAIVE: _naive, OKTOPK: _oktopk, LEAN: _lean, LEAN_HOST: _lean_host,
}  # fmt: skip


def _until(name: str) -> str:
    return f"until the gradient of {name}"


def _backward(profile: Profile, still: Footprint, held: Sequence[int] | None = None) -> Iterator[Footprint]:
    for index, arrival in enumerate(profile.arrivals):
        yield still.with_moment(_until(arrival.name), arrival.highest, gradients=held[index] if held else 0)


def _optimizer(profile: Profile, still: Footprint) -> Footprint:
    return still.with_moment("optimizer step", profile.after, workspace=profile.optimizer.workspace)


def _exchanges(
    profile: Profile, setting: Setting, buckets: Sequence[BucketSize], still: Footprint
) -> Iterator[Footprint]:
    """As each sparse bucket is complete, the messages of the one before still being under way."""
    before = {"send": 0, "receive": 0, "workspace": 0}
    for bucket in sorted((bucket for bucket in buckets if bucket.sparse), key=lambda bucket: bucket.complete):
        arrival = profile.arrivals[bucket.complete]
        messages, balancing = _messages(bucket, setting)
        for own in (messages, balancing):
            together = {kind: before[kind] + own[kind] for kind in before}
            yield still.with_moment(f"exchange of the bucket to {arrival.name}", arrival.then, **together)
        before = messages


def _messages(bucket: BucketSize, setting: Setting) -> tuple[dict[str, int], dict[str, int]]:
    """What an exchange of fixed-size messages needs, in a usual step, and where it balances regions first."""
    sizes, ranks = Sizes.of(bucket.numel, setting.ranks, setting.density, setting.options), setting.ranks
    send = (ranks + 1) * sizes.message_nbytes
    usual = {"send": send, "receive": 2 * ranks * sizes.message_nbytes, "workspace": 2 * 4 * ranks * sizes.capacity}
    # A chunk at a time: what waits and the gradient added up, then what passes as bytes and as counts of two widths.
    balancing = 0 if sizes.selects_all else (4 + 1 + 4 + 8) * min(bucket.numel, CHUNK_NUMEL)
    return usual, {"send": send, "receive": 0, "workspace": balancing}


def _owners(buckets: Sequence[BucketSize], setting: Setting) -> int:
    """An owner's sums: all buckets use what the one with the widest region needs."""
    return max((4 * widest_numel(bucket.numel, setting.ranks) for bucket in buckets if bucket.sparse), default=0)


def _dense_until(profile: Profile, buckets: Sequence[BucketSize]) -> list[int]:
    """How much has come of dense buckets that are not complete, before each arrival: it stays where it came."""
    held = [0] * (len(profile.arrivals) + 1)
    for bucket in (bucket for bucket in buckets if not bucket.sparse):
        for index in bucket.arrivals:
            for later in range(index + 1, bucket.complete + 1):
                held[later] += profile.arrivals[index].nbytes
    return held


def _buckets(profile: Profile, setting: Setting) -> list[BucketSize]:
    if setting.buckets is None:
        return by_bytes(profile, BUCKET_NBYTES, sparsely=True)
    return by_names(profile, setting.buckets)
