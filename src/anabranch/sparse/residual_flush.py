"""What waits for parameters that no sparse bucket sends: it goes with their next gradients, before these are averaged.

After a change of plan, or from a checkpoint, something may wait that the layout in force would never send. A hook on
the parameter adds it to the gradient of the next backward pass, on this rank alone; whoever averages that gradient
sends it. If the average is not finite, nobody will apply it, and it waits on. So nothing needs a message of its own.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from anabranch.comm.dense import all_finite
from anabranch.comm.flat import shaped
from anabranch.sparse.state import SparseState

Applied = Callable[[Collection[str]], Collection[str]]


class ResidualFlush:
    """Sends from ``state`` what its buckets do not; ``sparse`` are the parameters that are in buckets.

    ``averaged``: whether the backward pass that ends was averaged. ``applied``, where parameters are updated inside
    backward: which of these were; else their averages tell.
    """

    def __init__(
        self,
        state: SparseState,
        parameters: Mapping[str, torch.Tensor],
        averaged: Callable[[], bool],
        applied: Applied | None = None,
    ) -> None:
        self._state, self._parameters, self._averaged = state, parameters, averaged
        self._applied = applied or self._if_finite
        self.sparse: Collection[str] = ()
        self._handles: list[RemovableHandle] = []

    def keep(self, sparse: Collection[str]) -> None:
        """From now on only these parameters are in sparse buckets: what waits for the others goes soon."""
        self.sparse = sparse
        self._state.release(sparse)
        self.close()
        for name in self._state.loose:
            if name in self._parameters and name not in sparse:
                self._handles.append(self._parameters[name].register_hook(partial(self._add, name)))

    def close(self) -> None:
        """Take the hooks away."""
        while self._handles:
            self._handles.pop().remove()

    def _add(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        # Callbacks run when backward ends, in turn; the one that ours queues comes after DDP's, which averages.
        queue = Variable._execution_engine.queue_callback
        queue(lambda: queue(self._check))
        piece = self._state.lend(name)
        return gradient if piece is None else gradient + shaped(piece, self._parameters[name]).to(gradient)

    def _check(self) -> None:
        """What was added is sent if the averages are finite; under no_sync() that is seen after a later pass."""
        if not self._state.lent or not self._averaged():
            return
        self._state.settle(self._applied(self._state.lent))
        self.keep(self.sparse)

    def _if_finite(self, names: Collection[str]) -> Collection[str]:
        """All or none: whoever steps with these gradients leaves the whole step out if any is not finite."""
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        return names if bool(all_finite(*gradients)) else ()
