"""The modes of training by the names that ``anabranch memory`` has for them, and the peak memory of each.

Beside those that ``planning.memory`` knows, there are rivals and sharded models:

    naive sparse    weights n, gradients n, residual n; after backward a flat copy of all gradients, its magnitudes, an
                    all-gather of 2kP words and a decompressed update: n each, except for the all-gather
    fsdp2, hsdp     see ``sharded.py``
"""

from collections.abc import Iterator, Mapping
from typing import cast

from anabranch.fsdp.planning.sharding_modes import UNPLANNED, sharding_mode
from anabranch.planning import memory
from anabranch.planning.memory import (
    FLOAT_NBYTES,
    PAIR_NBYTES,
    Footprint,
    ResidualPlacement,
    Setting,
    StepProfile,
    TrainingMode,
    constant_footprint,
    largest_footprint,
    optimizer_step,
    peak_footprint,
    until_gradient,
)
from anabranch.tools.predict.memory.sharded import sharded_footprints
from anabranch.values.kinds.formats import STORED
from anabranch.values.kinds.names import AUTO, COMPRESSED, DENSE, OKTOPK

DDP, LEAN_DENSE, NAIVE, LEAN, LEAN_BF16, LEAN_INT8 = (
    "ddp", "lean, dense", "naive sparse", "lean", "lean, residuals bf16", "lean, residuals int8",
)  # fmt: skip
DEFAULT_MODES = (DDP, LEAN_DENSE, NAIVE, OKTOPK, LEAN, LEAN_BF16, LEAN_INT8)


def _named() -> Iterator[tuple[str, TrainingMode]]:
    yield LEAN_DENSE, TrainingMode(DENSE, lean=True)
    for kind in (OKTOPK, *COMPRESSED, AUTO):
        lean = LEAN if kind == OKTOPK else f"{LEAN}, {kind}"
        yield kind, TrainingMode(kind)
        yield lean, TrainingMode(kind, lean=True)
        if TrainingMode(kind).keeps_residual:
            for form in STORED:
                yield f"{lean}, residuals {form}", TrainingMode(kind, True, cast(ResidualPlacement, form))


OUR_MODES: Mapping[str, TrainingMode] = dict(_named())  # those of ab.DataParallel, with an exchange of ours


def modes_of(exchange: str) -> list[str]:
    """The modes of one exchange, "oktopk", "dense", "auto" or a kind that rounds: in DataParallel, then on Lean."""
    return [name for name, mode in OUR_MODES.items() if mode.exchange == exchange]


def predict(profile: StepProfile, mode: str, setting: Setting | None = None) -> Footprint:
    """Return the footprint at the moment of a step when most memory is in use, in the mode of this name."""
    setting = setting or Setting()
    if mode == NAIVE:
        return largest_footprint(_naive(profile, setting))
    if mode.partition("@")[0] in UNPLANNED:
        return largest_footprint(sharded_footprints(profile, setting, sharding_mode(mode, UNPLANNED)))
    known = {DDP: memory.DDP, **OUR_MODES}
    if mode not in known:
        raise ValueError(f"mode is {mode!r}: expected one of {', '.join([DDP, NAIVE, *OUR_MODES, *UNPLANNED])}")
    return peak_footprint(profile, known[mode], setting)


def _naive(profile: StepProfile, setting: Setting) -> Iterator[Footprint]:
    n = profile.gradients_nbytes
    exchanged = max(n, FLOAT_NBYTES * profile.numel)  # in float32, whatever gradients are
    constant = constant_footprint(profile, setting, residual=exchanged)
    ready_nbytes = 0
    for gradient in profile.gradients:  # gradients stay where autograd puts them
        yield constant.plus_use(until_gradient(gradient.name), gradient.peak_before, gradients=ready_nbytes)
        ready_nbytes += gradient.nbytes
    k = max(1, round(setting.density * profile.numel))
    after = constant.plus_use("exchange", profile.after_backward, gradients=n)
    # A flat copy of all gradients, to which the residual is added; its magnitudes; values and int64 positions of k.
    yield after.plus("selection", workspace=2 * exchanged + 12 * k)
    gathered = PAIR_NBYTES * k * setting.ranks
    yield after.plus("decompression", workspace=2 * exchanged, send=PAIR_NBYTES * k, receive=gathered)
    yield optimizer_step(profile, constant.plus(gradients=n))
