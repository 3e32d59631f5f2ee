"""What stands in the graph for a tensor that was saved: a part of some bytes on the host, or the tensor itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Never

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from anabranch.activations.host_copies import Done
from anabranch.activations.host_pool import Buffer


class Stash:
    """The bytes of one storage on the host; also on the device until they are out, and again while they are needed."""

    def __init__(self, tensor: torch.Tensor, buffer: Buffer, gone: Callable[["Stash"], None]) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())  # no other gets its address while this lives
        self.version = tensor._version
        self.nbytes = tensor.untyped_storage().nbytes()
        self.buffer = buffer
        self.written: Done = None
        self.original: torch.Tensor | None = tensor.detach()  # until the copy out is over
        self.version_out = tensor._version  # the version it had then
        self.device: torch.Tensor | None = bytes_of(tensor)
        self.arrived: Done = None
        self.fresh = False  # fetched, and nobody has waited for it yet
        self.users = 0
        self.unused = 0  # by how many users, in this pass through the graph
        self.passes = 0
        self._gone = gone

    def __del__(self) -> None:
        """The graph is gone."""
        self._gone(self)

    def leave(self) -> None:
        """The copy out is over for whatever is issued from now on."""
        if self.original is not None:
            self.version_out = self.original._version
            self.original = None
            if self.arrived is None:  # else these bytes have come back for another pass through the graph
                self.device = None

    def check_unchanged(self, shape: torch.Size) -> None:
        """Refuse bytes that were written to before they were out."""
        now = self.version_out if self.original is None else self.original._version
        if now != self.version:
            refuse_change(shape, now, self.version)

    def used_by(self, saved: "Saved") -> None:
        """Leave the device when every user has had it in this pass; another pass through the graph fetches it again."""
        self.fresh = False
        if saved.passes == self.passes:
            saved.passes += 1
            self.unused -= 1
        if not self.unused:
            self.device, self.arrived = None, None
            self.passes += 1
            self.unused = self.users


@dataclass(slots=True)
class Saved:
    """What autograd keeps in place of an offloaded tensor: which part of which storage, and its place in line."""

    stash: Stash
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    position: int
    passes: int

    def seen_in(self, space: torch.Tensor) -> torch.Tensor:
        """The tensor, with its own strides, in bytes on the device."""
        empty = torch.empty(0, dtype=self.dtype, device=space.device)
        return empty.set_(space.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(slots=True)
class Kept:
    """A tensor that stays where it is; under hooks torch does not look whether it was changed, so we do."""

    tensor: torch.Tensor
    version: int

    def unchanged(self) -> torch.Tensor:
        """The tensor as it was saved."""
        if self.tensor._version != self.version:
            refuse_change(self.tensor.shape, self.tensor._version, self.version)
        return self.tensor


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def refuse_change(shape: torch.Size, now: int, saved: int) -> Never:
    """As torch does without hooks."""
    raise RuntimeError(
        f"a tensor of shape {tuple(shape)} that backward needs has been modified by an inplace operation since it was "
        f"saved: it is at version {now}, expected {saved}; use the operation that is not in place, or clone first"
    )
