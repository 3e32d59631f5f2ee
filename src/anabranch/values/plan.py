"""Plan: which gradients travel together, by which collective, on which lane, in which launch order."""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import ClassVar, Self

from anabranch.values.checks import STRICT, repeated
from anabranch.values.errors import PlanError
from anabranch.values.trace import TensorSpec, Trace

MAX_LANES = 64  # each lane is a communicator: a plan that asks for more is a mistake


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that travel as one message of kind ``collective`` on ``lane``."""

    names: tuple[str, ...]
    lane: int = 0
    collective: str = "dense"

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        if not self.names:
            raise ValueError("a bucket has no names: expected at least one gradient")
        if type(self.lane) is not int or not 0 <= self.lane < MAX_LANES:  # True or 1.0 would print otherwise
            raise ValueError(f"the bucket of {self.names[0]} is on lane {self.lane}: expected 0 to {MAX_LANES - 1}")
        if not self.collective:
            raise ValueError(f"the bucket of {self.names[0]} names no collective: expected e.g. 'dense'")


def bucket_label(number: int, collective: str, names: Sequence[str]) -> str:
    """The name of a bucket in timelines and traces; reports recognise buckets by it."""
    return f"bucket {number}: {collective}, {len(names)} tensors, {names[-1]}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Buckets in launch order, the same on every rank: a bucket is launched once its gradients are all there and every
    bucket before it has been launched; a lane carries one message at a time.
    """

    __pydantic_config__: ClassVar = STRICT

    buckets: tuple[Bucket, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "buckets", tuple(self.buckets))
        if not self.buckets:
            raise ValueError("a plan has no buckets: expected at least one")
        names = [name for bucket in self.buckets for name in bucket.names]
        if twice := repeated(names):
            raise ValueError(f"{twice} is in {names.count(twice)} places of the plan: expected exactly one bucket")

    def __len__(self) -> int:
        return len(self.buckets)

    @classmethod
    def from_cuts(cls, trace: Trace, cuts: Iterable[int]) -> Self:
        """Consecutive buckets on lane 0: each cut is the index, in ready order, of the tensor that opens a bucket."""
        return cls.of_runs(runs(trace.tensors, cuts)).check(trace)

    @classmethod
    def of_runs(cls, parts: Iterable[Sequence[TensorSpec]], lanes: int = 1) -> Self:
        """One bucket per part, in order, dealt to the lanes in turn."""
        return cls(tuple(Bucket(tuple(t.name for t in part), i % lanes) for i, part in enumerate(parts)))

    @property
    def lanes(self) -> int:
        """How many lanes the plan needs: one more than the highest that it names."""
        return 1 + max(bucket.lane for bucket in self.buckets)

    @property
    def canonical(self) -> str:
        """The plan as JSON with sorted keys and no spaces: equal plans, equal text."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON: what ranks compare before they run a plan."""
        return sha256(self.canonical.encode()).hexdigest()

    def indices(self, names: Sequence[str]) -> list[list[int]]:
        """The buckets as indices into ``names``, which they must partition; PlanError if they do not."""
        index = {name: i for i, name in enumerate(names)}
        planned = [name for bucket in self.buckets for name in bucket.names]
        if unknown := [name for name in planned if name not in index]:
            raise PlanError(f"the plan names {unknown[0]}, which this model does not train; plan for this model")
        if missing := sorted(index.keys() - set(planned)):
            raise PlanError(f"the plan leaves out {missing[0]} and {len(missing) - 1} more; plan for this model")
        return [[index[name] for name in bucket.names] for bucket in self.buckets]

    def check(self, trace: Trace) -> Self:
        """This plan, if it puts every gradient of ``trace`` into exactly one bucket of one dtype; else PlanError."""
        kinds = {tensor.name: tensor.kind for tensor in trace.tensors}
        planned = {name for bucket in self.buckets for name in bucket.names}
        if missing := [name for name in kinds if name not in planned]:
            raise PlanError(f"the plan leaves out {_some(missing)}: every gradient must be in one bucket; plan again")
        if unknown := sorted(planned - kinds.keys()):
            raise PlanError(f"the plan names {_some(unknown)}, which the model does not have; plan for this model")
        for bucket in self.buckets:
            for name in bucket.names:
                if kinds[name] != kinds[bucket.names[0]]:
                    raise PlanError(
                        f"one bucket holds {bucket.names[0]} of {_dtype(kinds[bucket.names[0]])} and {name} of "
                        f"{_dtype(kinds[name])}: a message has one dtype; split the bucket"
                    )
        return self


def runs(tensors: Sequence[TensorSpec], cuts: Iterable[int]) -> list[Sequence[TensorSpec]]:
    """The tensors cut into consecutive parts; 0 and len(tensors) are allowed among the cuts and change nothing."""
    inner = [cut for cut in cuts if cut not in (0, len(tensors))]
    edges = [0, *inner, len(tensors)]
    if any(high <= low for low, high in itertools.pairwise(edges)):
        raise ValueError(f"cuts are {inner}: expected rising indices between 1 and {len(tensors) - 1}")
    return [tensors[low:high] for low, high in itertools.pairwise(edges)]


def _some(names: Sequence[str]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _dtype(kind: tuple[str, int]) -> str:
    return kind[0] or f"{kind[1]}-byte elements"
