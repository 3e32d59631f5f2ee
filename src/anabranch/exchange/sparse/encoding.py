"""Encoding of (value, position) pairs as bytes, with values in float32, rounded to bfloat16, or rounded to int8.

A pair is two int32: the bits of a float32 value, and its position in its region, −1 in an unused slot. The *body* of a
message is a table and then the entries:

    wire   table                                    entry     offset or position   value
    fp32   –                                        8 bytes   4                    4
    bf16   chunks                                   4 bytes   2                    2
    int8   chunks, and a bfloat16 scale per group   3 bytes   2                    1

A region is divided into chunks of 65,536 elements, and entries are in the order of chunks. The table says how many
entries come before each chunk but the first (int32); an entry has its offset in its chunk, and the number of entries is
known from elsewhere. A group is a run of elements of a chunk, in which about ``GROUP_ENTRIES`` entries share a scale:
the largest of their magnitudes over 127. Byte order is the machine's own, little-endian wherever torch runs GPUs.

Encoding rounds. What a receiver will read is what the sender gets if it decodes its own message.
"""

from collections.abc import Sequence

import torch

from anabranch.values.kinds.formats import CHUNK_BITS, FORMATS, HEAD_NBYTES, NEGLIGIBLE, Encoding
from anabranch.values.kinds.names import INT8

OFFSET_NBYTES = 2
MOST = FORMATS[INT8].most


def encode(pairs: torch.Tensor, ends: torch.Tensor, encoding: Encoding) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables uint8 [R, …] and entries uint8 [m, …] of the pairs int32 [m, 2] of R messages, one after another.

    ``ends`` (int64 [R]) says before which pair each message ends. The pairs of a message are in order of position,
    unused slots last.
    """
    if not encoding.rounds:
        return pairs.new_empty(len(ends), 0, dtype=torch.uint8), pairs.view(torch.uint8)
    values, positions = pairs[:, 0].contiguous().view(torch.float32), pairs[:, 1].to(torch.int64)
    numbers = torch.arange(len(ends), device=pairs.device)
    message = torch.searchsorted(ends, torch.arange(len(pairs), device=pairs.device), right=True)
    chunk = torch.where(positions < 0, encoding.chunks, positions >> CHUNK_BITS)
    begins = torch.arange(1, encoding.chunks, device=pairs.device) + numbers[:, None] * (encoding.chunks + 1)
    before = torch.searchsorted(message * (encoding.chunks + 1) + chunk, begins) - _starts(ends)[:, None]
    table = before.to(torch.int32).view(torch.uint8)
    offsets = positions.to(torch.int16)[:, None].view(torch.uint8)
    if encoding.precision == "bf16":
        return table, torch.cat([offsets, values.to(torch.bfloat16)[:, None].view(torch.uint8)], dim=1)
    group = message * encoding.groups + (positions.clamp(min=0) >> encoding.group_bits)
    largest = torch.zeros(len(ends) * encoding.groups, device=pairs.device)
    largest.scatter_reduce_(0, group, torch.where(positions < 0, 0.0, values.abs()), "amax")
    scales = torch.where(largest >= NEGLIGIBLE, largest * (1.0 / MOST), 0.0).to(torch.bfloat16)
    wide = scales.float()
    inverses = torch.where(wide > 0, 1.0 / wide, 0.0)
    integers = torch.round(values * inverses[group]).nan_to_num_(0.0).to(torch.int8)  # NaN: in a poisoned message
    table = torch.cat([table, scales.view(len(ends), -1).view(torch.uint8)], dim=1)
    return table, torch.cat([offsets, integers[:, None].view(torch.uint8)], dim=1)


def decode(
    table: torch.Tensor, entries: torch.Tensor, ends: torch.Tensor, used: torch.Tensor, encoding: Encoding
) -> torch.Tensor:
    """Pairs int32 [m, 2] of R messages, encoded as by ``encode``; ``used`` (int64 [R]): slots in use, by message."""
    if not encoding.rounds:
        return entries.contiguous().view(torch.int32)
    starts, chunk_nbytes = _starts(ends), 4 * (encoding.chunks - 1)
    before = table[:, :chunk_nbytes].reshape(-1).view(torch.int32).view(len(ends), encoding.chunks - 1)
    # The end of each chunk, and then of the unused slots, of one message after another.
    edges = torch.cat([torch.minimum(before, used[:, None]), used[:, None], (ends - starts)[:, None]], dim=1)
    slots = torch.arange(len(entries), device=entries.device)
    section = torch.searchsorted((edges + starts[:, None]).flatten(), slots, right=True)
    message, chunk = section // (encoding.chunks + 1), section % (encoding.chunks + 1)
    offsets = entries[:, :OFFSET_NBYTES].reshape(-1).view(torch.int16).to(torch.int64) & 0xFFFF
    position = (chunk << CHUNK_BITS) | offsets
    unused = chunk == encoding.chunks
    rest = entries[:, OFFSET_NBYTES:].reshape(-1)
    if encoding.precision == "bf16":
        values = rest.view(torch.bfloat16).float()
    else:
        scales = table[:, chunk_nbytes:].reshape(-1).view(torch.bfloat16).float()
        group = message * encoding.groups + torch.where(unused, 0, position >> encoding.group_bits)
        values = rest.view(torch.int8).float() * scales[group]
    bits = torch.where(unused, 0.0, values).view(torch.int32)
    return torch.stack([bits, torch.where(unused, -1, position).to(torch.int32)], dim=1)


def join_bodies(pairs: torch.Tensor, lengths: Sequence[int], encoding: Encoding) -> torch.Tensor:
    """The bodies (uint8) of messages of exactly their size, one after another; ``lengths``: of pairs in each."""
    table, entries = encode(pairs, _ends(lengths, pairs.device), encoding)
    if not encoding.rounds:
        return entries.flatten()
    parts = zip(table, entries.split(list(lengths)), strict=True)
    return torch.cat([part.flatten() for body in parts for part in body])


def split_bodies(bodies: torch.Tensor, lengths: Sequence[int], encoding: Encoding) -> torch.Tensor:
    """The pairs int32 [m, 2] in such bodies."""
    if not encoding.rounds:
        return bodies.view(-1, encoding.entry_nbytes).view(torch.int32)
    sizes = [nbytes for length in lengths for nbytes in (encoding.table_nbytes, length * encoding.entry_nbytes)]
    parts = bodies.split(sizes)
    ends = _ends(lengths, bodies.device)
    entries = torch.cat(parts[1::2]).view(-1, encoding.entry_nbytes)
    return decode(torch.stack(parts[::2]), entries, ends, ends - _starts(ends), encoding)


def frame_messages(heads: torch.Tensor, pairs: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """Messages of fixed size, uint8 [P, nbytes], from heads int32 [P, 2] and pairs int32 [P, m, 2]."""
    table, entries = encode(pairs.flatten(0, 1), _equal_ends(pairs.shape[0], pairs.shape[1], pairs.device), encoding)
    return torch.cat([heads.view(torch.uint8), table, entries.view(len(pairs), -1)], dim=1)


def unframe_messages(messages: torch.Tensor, encoding: Encoding) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads int32 [P, 2] and pairs int32 [P, m, 2] of such messages; of a poisoned one, no rounded pairs."""
    ranks, table_end = len(messages), HEAD_NBYTES + encoding.table_nbytes
    heads = messages[:, :HEAD_NBYTES].contiguous().view(torch.int32)
    entries = messages[:, table_end:].reshape(-1, encoding.entry_nbytes)
    slots = len(entries) // ranks
    used = heads[:, 0].clamp(min=0, max=slots)
    ends = _equal_ends(ranks, slots, messages.device)
    pairs = decode(messages[:, HEAD_NBYTES:table_end], entries, ends, used, encoding)
    return heads, pairs.view(ranks, slots, 2)


def message_head(count: torch.Tensor, poison: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
    """int32 [..., 2]: the count, or −1 where ``poison`` is set, and the bits of the float32 ``extra``."""
    counts = torch.where(poison, -1, count.to(torch.int32))
    return torch.stack([counts, extra.view(torch.int32).expand_as(counts)], dim=-1)


def _ends(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int64, device=device).cumsum(0)


def _equal_ends(messages: int, slots: int, device: torch.device) -> torch.Tensor:
    """``_ends`` of equal lengths, without a copy from the host, which would wait for the device."""
    return torch.arange(1, messages + 1, device=device) * slots


def _starts(ends: torch.Tensor) -> torch.Tensor:
    return ends - ends.diff(prepend=ends.new_zeros(1))
