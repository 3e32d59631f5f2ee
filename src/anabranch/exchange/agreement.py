"""Agreement between ranks: rank 0 decides, all ranks receive the same bytes, and differences raise a clear error.

Messages are tensors of bytes, never pickles. All functions are collective. Every wait ends at the group's own timeout.

Where a function takes several groups, these are the dimensions of a mesh, in its order, and it asks all ranks of the
mesh: rank 0 is the first of these. One dimension after the other would not do: a rank that has seen a difference along
one raises, and those that have not wait for it along the next.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from typing import TypeVar

import torch
import torch.distributed as dist

from anabranch.exchange.interface import Group, issued
from anabranch.values.errors import CollectiveError, DisagreementError
from anabranch.values.files import dumps, loads
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

AnyNoun = TypeVar("AnyNoun", Trace, Network, Plan)


@contextmanager
def explained(what: str = "ranks could not agree") -> Iterator[None]:
    """A context in which torch's error about a message becomes a CollectiveError that says what it was and what to do.

    Torch does not say whose message it was.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        raise CollectiveError(
            f"{what}: {error}. Another rank has died, stalled or left this step: look for the first error among all "
            "ranks"
        ) from error


def wire_device(group: Group) -> torch.device:
    """The device on which tensors for the group's small messages must be: NCCL cannot send host memory."""
    if "gloo" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@explained()
def from_rank_0(payload: bytes | None, group: Group) -> bytes:
    """Rank 0's payload, on every rank; what other ranks pass is ignored."""
    device = wire_device(group)
    is_rank_0 = dist.get_rank(group) == 0
    content = payload if is_rank_0 and payload is not None else b""
    size = torch.tensor([len(content)], dtype=torch.int64, device=device)
    dist.broadcast(size, group_src=0, group=group)
    data = _tensor(content, int(size.item()), device)
    dist.broadcast(data, group_src=0, group=group)
    return _bytes(data)


def number_of_rank_0(number: int, group: Group) -> Callable[[], int]:
    """Start to send rank 0's number, from 0 to 255; the returned function waits for it. Collective.

    Called some steps later, it does not wait: where ranks share few cores, every wait for another rank costs time.
    """
    sent = torch.tensor([number], dtype=torch.uint8, device=wire_device(group))
    work = issued(dist.broadcast(sent, group_src=0, group=group, async_op=True))

    @explained()
    def received() -> int:
        work.wait()
        return int(sent.item())

    return received


@explained()
def from_all_ranks(payload: bytes, *groups: Group) -> list[bytes]:
    """Every rank's payload, in rank order, on every rank."""
    payloads = [payload]
    for group in reversed(groups):
        along = [_from_group(one, group) for one in payloads]
        payloads = [one for of_rank in zip(*along, strict=True) for one in of_rank]
    return payloads


@explained()
def to_rank_0(payload: bytes, group: Group) -> list[bytes]:
    """Every rank's payload, in rank order, on rank 0; an empty list on the others."""
    return _from_group(payload, group, only_to_rank_0=True)


@explained()
def true_on_all_ranks(flag: bool, group: Group) -> bool:
    """Whether ``flag`` is true on every rank; all ranks get the same answer."""
    flags = torch.tensor([flag], dtype=torch.int32, device=wire_device(group))
    dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=group)
    return bool(flags.item())


@explained()
def latest_over_ranks(trace: Trace, group: Group) -> Trace:
    """This trace with every time replaced by the latest over all ranks, since a collective waits for the last rank."""
    by_name = sorted(trace.tensors, key=lambda tensor: tensor.name)  # the same order on every rank
    instants = torch.tensor([trace.forward_s, *(t.ready_s for t in by_name)], dtype=torch.float64)
    instants = instants.to(wire_device(group))
    dist.all_reduce(instants, op=dist.ReduceOp.MAX, group=group)
    forward_s, *ready_s = instants.tolist()
    position = {tensor.name: index for index, tensor in enumerate(trace.tensors)}
    tensors = [replace(tensor, ready_s=s) for tensor, s in zip(by_name, ready_s, strict=True)]
    tensors.sort(key=lambda tensor: (tensor.ready_s, position[tensor.name]))
    return replace(trace, tensors=tuple(tensors), forward_s=forward_s)


def same_on_all_ranks(lines: Sequence[str], *groups: Group) -> bool:
    """Whether all ranks pass the same lines; all ranks get the same answer."""
    return len(set(from_all_ranks(sha256("\n".join(lines).encode()).digest(), *groups))) == 1


def check_same(what: str, lines: Sequence[str], *groups: Group) -> None:
    """Raise DisagreementError on every rank unless all ranks pass the same lines; it names the first difference."""
    if same_on_all_ranks(lines, *groups):
        return
    versions = [part.decode().split("\n") for part in from_all_ranks("\n".join(lines).encode(), *groups)]
    others = [rank for rank, version in enumerate(versions) if version != versions[0]]
    first, other = versions[0], versions[others[0]]
    at = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
    raise DisagreementError(
        f"{what} is not the same on all ranks: rank 0 has {_line(first, at)}, rank {others[0]} has {_line(other, at)}; "
        f"ranks {_ranks(others)} differ from rank 0. Build it the same way on every rank"
    )


@contextmanager
def all_or_none(what: str, *groups: Group) -> Iterator[None]:
    """A context that fails on every rank if it fails on one: there with its own error, elsewhere DisagreementError.

    Ranks tell each other at its end, so what is inside must not communicate. No rank waits for one that has failed.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    words = [part.decode() for part in from_all_ranks(b"" if error is None else repr(error).encode(), *groups)]
    if error is not None:
        raise error
    if failed := [rank for rank, word in enumerate(words) if word]:
        raise DisagreementError(
            f"{what} failed on ranks {_ranks(failed)}, and not here; rank {failed[0]}: {words[failed[0]]}"
        )


def agree_on(kind: type[AnyNoun], noun: AnyNoun | None, group: Group) -> AnyNoun:
    """Rank 0's noun on every rank, equal to the last bit; what other ranks pass is ignored."""
    word = kind.__name__.lower()
    payload = dumps(noun).encode() if noun is not None and dist.get_rank(group) == 0 else None
    text = from_rank_0(payload, group)
    check_same(f"the {word} received from rank 0", [sha256(text).hexdigest()], group)
    received = loads(text, f"the {word} of rank 0")
    if not isinstance(received, kind):
        raise DisagreementError(f"rank 0 sent a {type(received).__name__} where a {word} was expected")
    return received


def _from_group(payload: bytes, group: Group, only_to_rank_0: bool = False) -> list[bytes]:
    """Every rank's payload along one group; ``only_to_rank_0``: an empty list on the others."""
    device = wire_device(group)
    ranks = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(payload)], dtype=torch.int64, device=device), group=group)
    lengths = [int(size.item()) for size in sizes]
    longest = max(lengths)
    own = _tensor(payload, longest, device)
    if only_to_rank_0 and dist.get_rank(group) != 0:
        dist.gather(own, group_dst=0, group=group)
        return []
    parts = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(ranks)]
    if only_to_rank_0:
        dist.gather(own, parts, group_dst=0, group=group)
    else:
        dist.all_gather(parts, own, group=group)
    return [_bytes(part)[:length] for part, length in zip(parts, lengths, strict=True)]


def _tensor(content: bytes, size: int, device: torch.device) -> torch.Tensor:
    if size == 0:
        return torch.zeros(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8).to(device)


def _bytes(data: torch.Tensor) -> bytes:
    return data.cpu().numpy().tobytes()


def _line(lines: Sequence[str], at: int) -> str:
    return f"{lines[at]!r} (item {at})" if at < len(lines) else f"nothing after item {at - 1}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
