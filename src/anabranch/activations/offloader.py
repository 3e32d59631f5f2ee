"""Activations on the host between forward and backward, through saved-tensor hooks."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from anabranch.activations.host_copies import Copies, Done, copies_for
from anabranch.activations.host_pool import HostPool
from anabranch.activations.offloaded import Kept, Saved, Stash

MIB = 1 << 20
PART_OF = 8  # a tensor that is less than this part of its storage is a slice of something that somebody else keeps
LOOK_AHEAD = 256  # saved tensors, of which many may be gone


@dataclass
class Counts:
    """What an offloader has done so far; ``late`` copies back were asked for only when they were needed."""

    offloaded: int = 0
    offloaded_nbytes: int = 0
    largest_nbytes: int = 0  # of them, since somebody set this to 0
    shared: int = 0  # saved again while already offloaded: nothing was copied
    kept: int = 0
    fetched: int = 0
    late: int = 0
    waits: int = 0  # forward had to wait for the link
    stood_back: int = 0  # hooks of the user's own were active


class Offloader:
    """Copies what autograd saves to the host while forward goes on, and back ahead of its use in backward.

    device          whose tensors are offloaded
    least_nbytes    smaller storages stay
    window_nbytes   how much may wait for its copy out, after which computation waits for the oldest
    ahead_nbytes    how much may be back before it is needed
    host_nbytes     how much host memory may be used; what finds none stays on the device
    """

    def __init__(
        self,
        device: torch.device,
        least_nbytes: int = MIB,
        window_nbytes: int = 512 * MIB,
        ahead_nbytes: int = 512 * MIB,
        host_nbytes: int | None = None,
    ) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.pool = HostPool(device.type == "cuda", host_nbytes)
        self.counts = Counts()
        self._orphans: deque[tuple[torch.Tensor | None, Done]] = deque()  # fetched for a graph that is gone
        self._least_nbytes, self._window_nbytes, self._ahead_nbytes = least_nbytes, window_nbytes, ahead_nbytes
        self._copies: Copies = copies_for(device)
        self._stashes: weakref.WeakValueDictionary[tuple[int, int], Stash] = weakref.WeakValueDictionary()
        self._leaving: deque[tuple[torch.Tensor, weakref.ref[Stash], Done]] = deque()  # not to be freed before
        self._line: dict[int, weakref.ref[Stash]] = {}  # in the order of saving, which backward goes through in reverse
        self._coming: list[tuple[int, weakref.ref[Stash]]] = []  # fetched, but perhaps not used yet
        self._position = 0
        self._fixed: frozenset[int] = frozenset()  # addresses of parameters and buffers
        self._hooks = (self._pack, self._unpack)
        self._keep_hooks = (self._keep, self._unpack)

    def __deepcopy__(self, memo: object) -> Self:
        """A copied model goes on with the same offloader."""
        return self

    @property
    def live(self) -> int:
        """Storages that are on the host now because a graph needs them."""
        return len(self._stashes)

    @contextmanager
    def hooks(self, *modules: nn.Module) -> Iterator[None]:
        """Offload what is saved in here, but not the parameters and buffers of ``modules``."""
        if self._stands_back():
            yield
            return
        before = self._fixed
        held = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
        self._fixed = before.union(tensor.untyped_storage().data_ptr() for tensor in held)
        try:
            with saved_tensors_hooks(*self._hooks):
                yield
        finally:
            self._fixed = before

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Keep on the device what is saved in here, also within ``hooks()``."""
        if _top_hooks() not in (self._hooks, self._keep_hooks):
            yield
            return
        with saved_tensors_hooks(*self._keep_hooks):
            yield

    def close(self) -> None:
        """Let go of all that is not part of a living graph; the offloader can still be used."""
        self._release(0)
        while self._orphans:
            self._copies.wait(self._orphans.popleft()[1])
        self.pool.clear()

    def _stands_back(self) -> bool:
        """Of nested hooks torch calls the innermost only: those of the user must not be lost to ours."""
        top = _top_hooks()
        if top is None or top in (self._hooks, self._keep_hooks):
            return False
        self.counts.stood_back += 1
        return True

    # ------------------------------------------------------------------------------------------------ forward

    def _keep(self, tensor: torch.Tensor) -> Kept:
        self.counts.kept += 1
        return Kept(tensor.detach(), tensor._version)  # not the tensor itself: that would hold the graph in a circle

    def _pack(self, tensor: torch.Tensor) -> Saved | Kept:
        stash = self._stashed(tensor) if self._takes(tensor) else None
        if stash is None:
            return self._keep(tensor)
        position, self._position = self._position, self._position + 1
        self._line[position] = weakref.ref(stash)
        stash.users += 1
        stash.unused += 1
        offset = int(tensor.storage_offset())
        return Saved(stash, tensor.dtype, tensor.size(), tensor.stride(), offset, position, stash.passes)

    def _takes(self, tensor: torch.Tensor) -> bool:
        """Whether offloading this would free anything, and can be undone bit by bit."""
        if type(tensor) is not torch.Tensor or tensor.device != self.device or tensor.layout != torch.strided:
            return False
        if isinstance(tensor._base, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad):
            return False
        storage = tensor.untyped_storage()
        return (
            storage.nbytes() >= self._least_nbytes
            and tensor.numel() * tensor.itemsize * PART_OF >= storage.nbytes()
            and storage.data_ptr() not in self._fixed
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        )

    def _stashed(self, tensor: torch.Tensor) -> Stash | None:
        """The stash of its storage, on the way to the host from now on if it is not yet."""
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version)
        stash = self._stashes.get(key)
        if stash is not None:
            self.counts.shared += 1
            return stash
        if not self._stashes:  # nothing is left of earlier steps
            self._line.clear()
        elif len(self._line) > 4 * len(self._stashes) + 4096:
            self._line = {position: ref for position, ref in self._line.items() if ref() is not None}
        self._tidy()
        buffer = self.pool.take(storage.nbytes())
        if buffer is None:
            return None
        stash = self._stashes[key] = Stash(tensor, buffer, self._gone)
        assert stash.device is not None
        stash.written = self._copies.out(stash.device, buffer)
        self.counts.offloaded += 1
        self.counts.offloaded_nbytes += stash.nbytes
        self.counts.largest_nbytes = max(self.counts.largest_nbytes, stash.nbytes)
        self._leaving.append((stash.device, weakref.ref(stash), stash.written))
        self._release(self._window_nbytes)
        return stash

    def _release(self, window_nbytes: int) -> None:
        """Free the oldest that wait for their copy, behind that copy, until no more than a window waits."""
        waiting = sum(source.numel() for source, _, _ in self._leaving)
        while self._leaving and waiting > window_nbytes:
            source, ref, written = self._leaving.popleft()
            waiting -= source.numel()
            if not self._copies.is_done(written):
                self.counts.waits += 1
                self._copies.wait(written)
            stash = ref()
            if stash is not None:
                stash.leave()

    def _tidy(self) -> None:
        """Free what only copies that are over have held, without waiting for any."""
        while self._orphans and self._copies.is_done(self._orphans[0][1]):
            self._orphans.popleft()
        if any(ref() is None for _, ref, _ in self._leaving):
            self._leaving = deque(
                entry for entry in self._leaving if entry[1]() is not None or not self._copies.is_done(entry[2])
            )

    def _gone(self, stash: Stash) -> None:
        """Its graph is, on whatever thread: only put things where the next call finds them."""
        if stash.fresh and stash.device is not None:
            self._orphans.append((stash.device, stash.arrived))
        self.pool.give(stash.buffer)

    # ----------------------------------------------------------------------------------------------- backward

    def _unpack(self, saved: Saved | Kept) -> torch.Tensor:
        if isinstance(saved, Kept):
            return saved.unchanged()
        stash = saved.stash
        stash.check_unchanged(saved.size)
        if stash.device is None:
            self.counts.late += 1
            self._fetch(stash)
        assert stash.device is not None
        self._copies.wait(stash.arrived)
        tensor = saved.seen_in(stash.device)
        stash.used_by(saved)
        self._tidy()
        self._fetch_ahead(saved.position)
        return tensor

    def _fetch(self, stash: Stash) -> None:
        stash.device, stash.arrived = self._copies.back(stash.buffer, stash.nbytes, stash.written)
        stash.fresh = True
        self.counts.fetched += 1

    def _fetch_ahead(self, position: int) -> None:
        """Fetch what was saved before this, last first, as far as the bytes allow; of anything at all, one."""
        ahead_nbytes, coming = 0, []
        for place, ref in self._coming:
            stash = ref()
            if stash is not None and stash.fresh and place < position:  # what was passed over does not come any more
                ahead_nbytes += stash.nbytes
                coming.append((place, ref))
        for place in range(position - 1, max(position - LOOK_AHEAD, 0) - 1, -1):
            waiting = self._line.get(place)
            stash = None if waiting is None else waiting()
            if waiting is None or stash is None or stash.device is not None:
                continue
            if ahead_nbytes and ahead_nbytes + stash.nbytes > self._ahead_nbytes:
                break
            self._fetch(stash)
            ahead_nbytes += stash.nbytes
            coming.append((place, waiting))
        self._coming = coming


def _top_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The hooks that torch would call now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
