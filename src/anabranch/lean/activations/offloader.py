"""Offloads saved activations to host memory between forward and backward, through autograd's saved-tensor hooks."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Never, Self

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from anabranch.lean.activations.host_copies import CopyDone, HostCopies, copies_for
from anabranch.lean.activations.host_pool import HostBuffer, HostPool

MIB = 1 << 20
SLICE_SHARE = 8  # a tensor of less than 1/8 of its storage is a slice of something that others keep anyway
LOOK_AHEAD = 256  # saved tensors, many of which may be gone


class OffloadedStorage:
    """The bytes of one storage in a host buffer, and for a while on the device.

    They are on the device until the copy out is done, and again from a fetch until every user in this backward pass has
    had them. The graph refers to it through ``OffloadedTensor``; ``on_freed`` is called when the graph is gone.
    """

    def __init__(
        self, tensor: torch.Tensor, buffer: HostBuffer, on_freed: Callable[["OffloadedStorage"], None]
    ) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())  # no other gets its address while this lives
        self.version = tensor._version
        self.nbytes = tensor.untyped_storage().nbytes()
        self.buffer = buffer
        self.on_device: torch.Tensor | None = _storage_bytes(tensor)
        self.copied_out: CopyDone = None
        self.fetched: CopyDone = None
        self.fetched_ahead = False  # fetched, and no user has had it yet
        self.users = 0
        self.passes = 0  # backward passes that are over
        self._users_left = 0  # in this backward pass
        self._original: torch.Tensor | None = tensor.detach()  # until the copy out is done
        self._version_copied = tensor._version  # the version it had when the copy out was done
        self._on_freed = on_freed

    def __del__(self) -> None:
        self._on_freed(self)

    def add_user(self) -> None:
        """Note one more tensor that autograd saves of this storage."""
        self.users += 1
        self._users_left += 1

    def leave_device(self) -> None:
        """Free the device memory: the copy out is done for all work issued from now on."""
        if self._original is not None:
            self._version_copied = self._original._version
            self._original = None
            if self.fetched is None:  # else these bytes are back for another backward pass
                self.on_device = None

    def check_unchanged(self, shape: torch.Size) -> None:
        """Refuse bytes that were written to before they were copied out."""
        version = self._version_copied if self._original is None else self._original._version
        if version != self.version:
            _raise_modified(shape, version, self.version)

    def used_by(self, saved: "OffloadedTensor") -> None:
        """Leave the device when every user has had it in this backward pass; another pass fetches it again."""
        self.fetched_ahead = False
        if saved.passes == self.passes:
            saved.passes += 1
            self._users_left -= 1
        if not self._users_left:
            self.on_device = None
            self.fetched = None
            self.passes += 1
            self._users_left = self.users


@dataclass(slots=True)
class OffloadedTensor:
    """What autograd keeps in place of an offloaded tensor: which part of which storage, and when it was saved."""

    storage: OffloadedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    position: int  # in the order of saving
    passes: int  # backward passes that have used it

    def view_of(self, storage_bytes: torch.Tensor) -> torch.Tensor:
        """Return the tensor, with its own strides, as a view of its storage's bytes."""
        empty = torch.empty(0, dtype=self.dtype, device=storage_bytes.device)
        return empty.set_(storage_bytes.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(slots=True)
class KeptTensor:
    """A saved tensor that stays on the device. Under hooks torch does not check for changes in place, so this does."""

    tensor: torch.Tensor
    version: int

    def unchanged(self) -> torch.Tensor:
        """Return the tensor; raises RuntimeError if it was changed since it was saved."""
        if self.tensor._version != self.version:
            _raise_modified(self.tensor.shape, self.tensor._version, self.version)
        return self.tensor


@dataclass
class OffloadCounts:
    """What an offloader has done so far."""

    offloaded_nbytes: int = 0
    largest_nbytes: int = 0  # the largest storage offloaded since the profiler last reset this
    late_fetches: int = 0  # copies back that were asked for only when they were needed
    forward_waits: int = 0  # how often forward had to wait for the link


class Offloader:
    """Copies what autograd saves to the host while forward goes on, and back ahead of its use in backward.

    device          whose tensors are offloaded
    least_nbytes    smaller storages stay
    window_nbytes   how much may be on its way out; beyond that, computation waits for the oldest copy
    ahead_nbytes    how much may be back before it is needed
    host_nbytes     how much host memory may be used; tensors that find none stay on the device
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
        without_data = device.type == "meta"  # the host's side has none either
        self.pool = HostPool(device.type == "cuda", host_nbytes, "meta" if without_data else "cpu")
        self.counts = OffloadCounts()
        self._least_nbytes = least_nbytes
        self._window_nbytes = window_nbytes
        self._ahead_nbytes = ahead_nbytes
        self._copies: HostCopies = copies_for(device)
        # By address and version of the storage.
        self._offloaded: weakref.WeakValueDictionary[tuple[int, int], OffloadedStorage] = weakref.WeakValueDictionary()
        # Being copied out: these bytes must not be freed before.
        self._copying_out: deque[tuple[torch.Tensor, weakref.ref[OffloadedStorage], CopyDone]] = deque()
        # In the order of saving, which backward goes through in reverse.
        self._by_position: dict[int, weakref.ref[OffloadedStorage]] = {}
        self._next_position = 0
        self._fetched_ahead: list[tuple[int, weakref.ref[OffloadedStorage]]] = []  # some may have been used since
        self._unused_fetches: deque[tuple[torch.Tensor | None, CopyDone]] = deque()  # for graphs that are gone
        self._persistent: frozenset[int] = frozenset()  # addresses of storages of parameters and buffers
        self._offload_hooks = (self._pack, self._unpack)
        self._keep_hooks = (self._keep, self._unpack)

    def __deepcopy__(self, memo: object) -> Self:
        """A copied model goes on with the same offloader."""
        return self

    @property
    def live_storages(self) -> int:
        """How many storages are on the host because a graph needs them."""
        return len(self._offloaded)

    @contextmanager
    def hooks(self, *modules: nn.Module) -> Iterator[None]:
        """Offload what is saved inside this context, but not the parameters and buffers of ``modules``."""
        # Of nested hooks torch calls the innermost only: inside the user's own, ours stay away.
        if _active_hooks() not in (None, self._offload_hooks, self._keep_hooks):
            yield
            return
        before = self._persistent
        held = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
        self._persistent = before.union(tensor.untyped_storage()._cdata for tensor in held)
        try:
            with saved_tensors_hooks(*self._offload_hooks):
                yield
        finally:
            self._persistent = before

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Keep on the device what is saved inside this context, also within ``hooks()``."""
        if _active_hooks() not in (self._offload_hooks, self._keep_hooks):
            yield
            return
        with saved_tensors_hooks(*self._keep_hooks):
            yield

    def close(self) -> None:
        """Free all memory that no living graph needs; the offloader can still be used."""
        self._release(0)
        while self._unused_fetches:
            self._copies.wait(self._unused_fetches.popleft()[1])
        self.pool.clear()

    # ------------------------------------------------------------------------------------------------ forward

    def _keep(self, tensor: torch.Tensor) -> KeptTensor:
        return KeptTensor(tensor.detach(), tensor._version)  # the tensor itself would make a cycle with its graph

    def _pack(self, tensor: torch.Tensor) -> OffloadedTensor | KeptTensor:
        storage = self._offload(tensor) if self._can_offload(tensor) else None
        if storage is None:
            return self._keep(tensor)
        position = self._next_position
        self._next_position += 1
        self._by_position[position] = weakref.ref(storage)
        storage.add_user()
        offset = int(tensor.storage_offset())
        return OffloadedTensor(storage, tensor.dtype, tensor.size(), tensor.stride(), offset, position, storage.passes)

    def _can_offload(self, tensor: torch.Tensor) -> bool:
        """Whether offloading this tensor would free memory, and can be undone bit by bit."""
        if type(tensor) is not torch.Tensor or tensor.device != self.device or tensor.layout != torch.strided:
            return False
        if isinstance(tensor._base, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad):
            return False
        storage = tensor.untyped_storage()
        return (
            storage.nbytes() >= self._least_nbytes
            and tensor.numel() * tensor.itemsize * SLICE_SHARE >= storage.nbytes()
            and storage._cdata not in self._persistent
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        )

    def _offload(self, tensor: torch.Tensor) -> OffloadedStorage | None:
        """Return the tensor's storage, whose copy out starts now if it has not before; None: the host has no room."""
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version)
        known = self._offloaded.get(key)
        if known is not None:
            return known
        self._forget_old_positions()
        self._free_finished()
        buffer = self.pool.take(storage.nbytes())
        if buffer is None:
            return None
        offloaded = self._offloaded[key] = OffloadedStorage(tensor, buffer, self._graph_freed)
        assert offloaded.on_device is not None
        offloaded.copied_out = self._copies.to_host(
            offloaded.on_device, buffer.memory[: offloaded.nbytes], (buffer.last_read,)
        )
        buffer.last_read = None
        self.counts.offloaded_nbytes += offloaded.nbytes
        self.counts.largest_nbytes = max(self.counts.largest_nbytes, offloaded.nbytes)
        self._copying_out.append((offloaded.on_device, weakref.ref(offloaded), offloaded.copied_out))
        self._release(self._window_nbytes)
        return offloaded

    def _forget_old_positions(self) -> None:
        if not self._offloaded:  # no graph of an earlier step is left
            self._by_position.clear()
        elif len(self._by_position) > 4 * len(self._offloaded) + 4096:
            self._by_position = {position: ref for position, ref in self._by_position.items() if ref() is not None}

    def _release(self, window_nbytes: int) -> None:
        """Free the oldest storages on their way out, behind their copy, until at most ``window_nbytes`` are left."""
        leaving_nbytes = sum(source.numel() for source, _, _ in self._copying_out)
        while self._copying_out and leaving_nbytes > window_nbytes:
            source, ref, copied_out = self._copying_out.popleft()
            leaving_nbytes -= source.numel()
            if not self._copies.is_done(copied_out):
                self.counts.forward_waits += 1
                self._copies.wait(copied_out)
            storage = ref()
            if storage is not None:
                storage.leave_device()

    def _free_finished(self) -> None:
        """Free memory that only copies which are done have held, without waiting for any copy."""
        while self._unused_fetches and self._copies.is_done(self._unused_fetches[0][1]):
            self._unused_fetches.popleft()
        if any(ref() is None for _, ref, _ in self._copying_out):
            self._copying_out = deque(
                entry for entry in self._copying_out if entry[1]() is not None or not self._copies.is_done(entry[2])
            )

    def _graph_freed(self, storage: OffloadedStorage) -> None:
        """Runs on any thread: only puts things where the next call finds them."""
        if storage.fetched_ahead and storage.on_device is not None:
            self._unused_fetches.append((storage.on_device, storage.fetched))
        self.pool.give(storage.buffer)

    # ----------------------------------------------------------------------------------------------- backward

    def _unpack(self, saved: OffloadedTensor | KeptTensor) -> torch.Tensor:
        if isinstance(saved, KeptTensor):
            return saved.unchanged()
        storage = saved.storage
        storage.check_unchanged(saved.size)
        if storage.on_device is None:
            self.counts.late_fetches += 1
            self._fetch(storage)
        assert storage.on_device is not None
        self._copies.wait(storage.fetched)
        tensor = saved.view_of(storage.on_device)
        storage.used_by(saved)
        self._free_finished()
        self._fetch_ahead(saved.position)
        return tensor

    def _fetch(self, storage: OffloadedStorage) -> None:
        """Start to copy a storage to new memory on the device."""
        storage.on_device = torch.empty(storage.nbytes, dtype=torch.uint8, device=self.device)
        self._copies.after_current_stream()
        source = storage.buffer.memory[: storage.nbytes]
        storage.fetched = self._copies.to_device(source, storage.on_device, (storage.copied_out,))
        storage.buffer.last_read = storage.fetched
        storage.fetched_ahead = True

    def _fetch_ahead(self, position: int) -> None:
        """Fetch what was saved before ``position``, last first, as far as ``ahead_nbytes`` allow; at least one."""
        ahead_nbytes = 0
        fetched: list[tuple[int, weakref.ref[OffloadedStorage]]] = []
        for place, ref in self._fetched_ahead:
            storage = ref()
            if storage is not None and storage.fetched_ahead and place < position:  # later ones were passed over
                ahead_nbytes += storage.nbytes
                fetched.append((place, ref))
        for place in range(position - 1, max(position - LOOK_AHEAD, 0) - 1, -1):
            saved = self._by_position.get(place)
            storage = None if saved is None else saved()
            if saved is None or storage is None or storage.on_device is not None:
                continue
            if ahead_nbytes and ahead_nbytes + storage.nbytes > self._ahead_nbytes:
                break
            self._fetch(storage)
            ahead_nbytes += storage.nbytes
            fetched.append((place, saved))
        self._fetched_ahead = fetched


def _active_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the saved-tensor hooks that torch would call now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _raise_modified(shape: torch.Size, found: int, saved: int) -> Never:
    """Raise as torch does without hooks."""
    raise RuntimeError(
        f"a tensor of shape {tuple(shape)} that backward needs has been modified by an inplace operation since it was "
        f"saved: it is at version {found}, expected {saved}; use the operation that is not in place, or clone first"
    )
