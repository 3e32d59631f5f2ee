"""MemoryEstimator: the peak memory of one model in every mode of training, at any batch, without running it."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Literal

import torch
from torch import nn

from anabranch.lean.activations.recompute import recompute
from anabranch.lean.options import OptimizerFactory
from anabranch.planning.footprint import CONVOLUTION_WORKSPACE, FRAGMENTATION, Footprint, Setting, StepProfile
from anabranch.tools.predict.memory.probe import Build, Loss, probe
from anabranch.tools.predict.memory.training_modes import DEFAULT_MODES, predict

ActivationMode = Literal["keep", "recompute"]
BuildAt = Callable[[int], Build]  # by batch: what makes the model and its loss

# foreach is the default on a GPU; it must be given for tensors on the meta device.
OPTIMIZERS: Mapping[str, OptimizerFactory] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, foreach=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, foreach=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-4, foreach=True),
}
MAX_BATCH = 1 << 16  # no larger batch is tried


class MemoryEstimator:
    """Predicts the peak memory of a model by kind of object, for every mode of training.

    Each batch runs once on tensors without data, so no GPU is needed. ``activations`` applies to the Lean modes; the
    others keep theirs. ``assumptions`` says what the predictions count and what they leave out.

    >>> def build_at(batch):
    ...     def build(device):
    ...         model = nn.Linear(1024, 1024, device=device)
    ...         inputs = torch.ones(batch, 1024, device=device)
    ...         return model, lambda wrapped: wrapped(inputs).sum()
    ...     return build
    >>> estimator = MemoryEstimator(build_at, lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True))
    >>> peaks = estimator.footprints(batch=8, setting=Setting(ranks=4))
    >>> peaks["ddp"].kinds["weights"], peaks["oktopk"].kinds["residual"]
    (4198400, 4194304)
    """

    def __init__(
        self,
        build_at: BuildAt,
        optimizer: OptimizerFactory,
        activations: ActivationMode = "keep",
        *,
        half: bool = False,
    ) -> None:
        """``half``: under autocast to bfloat16."""
        self._activations = activations

        @cache
        def profile(batch: int, activations: ActivationMode) -> StepProfile:
            build = build_at(batch)
            if activations == "recompute":
                build = with_recomputation(build)
            return probe(build, optimizer, half=half)

        self._profile = profile
        self.assumptions = [
            "the model in the type it is built in",
            "operations keep what they keep on a GPU",
            f"cuDNN takes {CONVOLUTION_WORKSPACE:g} times the bytes of a convolution's tensors, cuBLAS 64 MiB",
            "what NCCL, the CUDA context and fragmentation take is not counted",
            "buckets: 25 MiB in the order of backward; naive sparse exchanges the whole model after backward",
        ]
        if half:
            self.assumptions.append("forward runs under autocast to bfloat16; weights and gradients stay as they are")

    def footprints(self, batch: int, setting: Setting, modes: Sequence[str] = DEFAULT_MODES) -> dict[str, Footprint]:
        """The peak of these modes at one batch."""
        return {mode: self._footprint(batch, mode, setting) for mode in modes}

    def largest_batch(self, mode: str, setting: Setting, limit_nbytes: int) -> int:
        """The largest batch of a mode whose peak leaves room for fragmentation within the limit; 0 if none does."""
        within_nbytes = int(limit_nbytes * (1 - FRAGMENTATION))
        return largest_batch(lambda batch: self._footprint(batch, mode, setting).nbytes, within_nbytes)

    def _footprint(self, batch: int, mode: str, setting: Setting) -> Footprint:
        activations = self._activations if mode.startswith("lean") else "keep"
        return predict(self._profile(batch, activations), mode, setting)


def with_recomputation(build: Build) -> Build:
    """The same model, whose blocks are computed again in backward."""

    def rebuilt(device: torch.device) -> tuple[nn.Module, Loss]:
        model, loss = build(device)
        recompute(model)
        return model, loss

    return rebuilt


def largest_batch(
    nbytes_at: Callable[[int], int], limit_nbytes: int, first: int = 8, max_batch: int = MAX_BATCH
) -> int:
    """Return the largest batch up to ``max_batch`` whose peak is at most the limit; 0 if none is.

    ``nbytes_at`` gives the peak of a batch, and never falls. Peaks are nearly straight lines, so a line through the two
    nearest known batches says which to try next; both neighbours of the answer are tried in any case.
    """
    known = {0: 0}
    low, high, guess = 0, max_batch + 1, first
    while high - low > 1:  # low fits, high does not
        batch = min(high - 1, max(low + 1, guess))
        known[batch] = nbytes_at(batch)
        low, high = (batch, high) if known[batch] <= limit_nbytes else (low, batch)
        guess = _crossing(known, low, high, limit_nbytes) if low else high // 2
    return low


def _crossing(known: Mapping[int, int], low: int, high: int, limit_nbytes: int) -> int:
    """Return the batch at which a line through two known batches reaches the limit; twice ``low`` if it never does."""
    one, other = (low, high) if high in known else sorted(known)[-2:]
    slope = (known[other] - known[one]) / (other - one)
    return one + int((limit_nbytes - known[one]) / slope) if one and slope > 0 else 2 * low
