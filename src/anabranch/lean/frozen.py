"""Agreement on which parameters are frozen: one that is frozen on some ranks only would part the ranks' weights."""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import nn

from anabranch.exchange.agree import from_all_ranks
from anabranch.exchange.contracts import Group, issued
from anabranch.values.errors import CollectiveError, DisagreementError


class FrozenAgreement:
    """Compares between ranks which parameters are frozen, in every averaged backward pass.

    The message has 16 bytes and is sent while backward computes the first bucket. ``control`` returns the group for
    small messages in host memory.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], control: Callable[[], Group]) -> None:
        self._parameters = parameters
        self._control = control
        self._extremes = torch.zeros(2, dtype=torch.int64)  # the largest digest of all ranks, and the smallest times −1
        self._work: dist.Work | None = None

    def begin(self) -> None:
        """Start to compare; ``check`` must follow. Collective."""
        if dist.get_world_size(self._control()) == 1:
            return
        flags = bytes(parameter.requires_grad for parameter in self._parameters.values())
        digest = int.from_bytes(sha256(flags).digest()[:7])
        self._extremes = torch.tensor([digest, -digest])
        work = dist.all_reduce(self._extremes, op=dist.ReduceOp.MAX, group=self._control(), async_op=True)
        self._work = issued(work, "which parameters are frozen")

    def check(self) -> None:
        """Raise DisagreementError on every rank unless all ranks have frozen the same parameters."""
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise CollectiveError(
                f"ranks could not compare which parameters are frozen: {error}. Another rank has died, stalled or left "
                "this step: look for the first error among all ranks. This rank starts no further collective"
            ) from error
        largest, smallest = self._extremes.tolist()
        if largest != -smallest:
            self._raise_disagreement()

    def close(self) -> None:
        """Drop the last message, before its group is destroyed."""
        self._work = None

    def _raise_disagreement(self) -> None:
        own = [name for name, parameter in self._parameters.items() if not parameter.requires_grad]
        frozen = [part.decode().split("\n") for part in from_all_ranks("\n".join(own).encode(), self._control())]
        splits = (_split(name, frozen) for name in self._parameters)
        name, here, elsewhere = next(split for split in splits if split[1] and split[2])
        raise DisagreementError(
            f"{name} is frozen (requires_grad is False) on ranks {here} and not on ranks {elsewhere}: expected the "
            "same on all ranks, since their weights would part. No rank has updated anything in this step. Freeze it "
            "on every rank before the same forward; close() this DataParallel and wrap the module again"
        )


def _split(name: str, frozen: Sequence[Sequence[str]]) -> tuple[str, list[int], list[int]]:
    """The name, the ranks that have frozen it, and those that have not."""
    here = [rank for rank, names in enumerate(frozen) if name in names]
    return name, here, [rank for rank in range(len(frozen)) if rank not in here]
