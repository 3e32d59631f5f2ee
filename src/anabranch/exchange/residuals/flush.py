"""Sends residuals of parameters that no sparse bucket sends: added to their next gradients, before these are averaged.

After a change of plan, or from a checkpoint, a parameter may have a residual that the layout in force would never send.
A hook on the parameter adds it to the gradient of the next backward pass, on this rank alone, and the averaging of that
gradient sends it. If the average is not finite, nobody applies it, and the residual is kept. So residuals need no
message of their own.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from anabranch.exchange.contracts import record_stream
from anabranch.exchange.dense import all_finite
from anabranch.exchange.flat import shaped
from anabranch.exchange.residuals.state import SparseState

Applied = Callable[[Collection[str]], Collection[str]]


class ResidualFlush:
    """Sends the residuals in ``state`` that its buckets do not send.

    averaged   whether the backward pass that ends was averaged
    applied    where parameters are updated inside backward: which of the given parameters were. Elsewhere a gradient
               counts as applied if all averages are finite.
    """

    def __init__(
        self,
        state: SparseState,
        parameters: Mapping[str, torch.Tensor],
        averaged: Callable[[], bool],
        applied: Applied | None = None,
    ) -> None:
        self.sparse_names: Collection[str] = ()  # parameters that sparse buckets send
        self._state = state
        self._parameters = parameters
        self._averaged = averaged
        self._applied = applied or self._if_finite
        self._handles: list[RemovableHandle] = []

    def set_sparse_names(self, names: Collection[str]) -> None:
        """From now on sparse buckets send only these parameters: flush the residuals of all others."""
        self.sparse_names = names
        self._state.keep_buckets_of(names)
        self.close()
        for name in self._state.unbucketed:
            if name in self._parameters and name not in names:
                parameter = self._parameters[name]
                trained = parameter.requires_grad
                parameter.requires_grad_(True)  # else torch refuses a hook; a frozen parameter may be trained later
                self._handles.append(parameter.register_hook(partial(self._add, name)))
                parameter.requires_grad_(trained)

    def close(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _add(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        # Callbacks run in order when backward ends. One queued by a callback runs after DDP's, which averages.
        queue = Variable._execution_engine.queue_callback
        queue(lambda: queue(self._check))
        piece = self._state.begin_flush(name)
        if piece is None:
            return gradient
        added = gradient + shaped(piece.to(gradient.device), self._parameters[name])
        record_stream(piece)  # it is dropped at the end of this pass, and may be of another stream
        if gradient.dtype != torch.float16:
            return added.to(gradient.dtype)
        return self._fitting(name, added, gradient)

    def _fitting(self, name: str, added: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """What float16 can hold of a sum. The rest waits: an infinite sum would never be sent."""
        largest = torch.finfo(gradient.dtype).max
        fitting = added.clamp(-largest, largest)
        rest = torch.where(gradient.isfinite(), added - fitting, 0.0)
        if bool(rest.any()):
            whole = torch.empty_like(self._state.flushing[name], device=rest.device)
            shaped(whole, self._parameters[name]).copy_(rest)
            self._state.put_back(name, whole)
        return fitting.to(gradient.dtype)

    def _check(self) -> None:
        """Residuals that were added count as sent if they were applied; under no_sync() a later pass decides."""
        if not self._state.flushing or not self._averaged():
            return
        self._state.end_flush(self._applied(self._state.flushing))
        self.set_sparse_names(self.sparse_names)

    def _if_finite(self, names: Collection[str]) -> Collection[str]:
        """All names or none: the optimizer's step is skipped as a whole if any gradient is not finite."""
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        return names if bool(all_finite(*gradients)) else ()
