"""The modes of training by the names that ``anabranch memory`` has for them, and the peak memory of each.

In addition to those of ``planning.footprint``, a rival and sharded models:

    naive sparse    weights n, gradients n, residual n; after backward a flat copy of all gradients, its magnitudes, an
                    all-gather of 2kP words and a decompressed update: n each, except for the all-gather
    fsdp2           shards of weights, gradients and state; gathered weights and whole gradients, unit by unit
    hsdp            the same with larger shards, one per rank of a node; averages between nodes are dense, and in place

Units are blocks by the names of their parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from anabranch.fsdp.planning.sharded_step import REST, REST_LABEL, host_order, unsharded_at
from anabranch.fsdp.planning.sharding_modes import RESHARD, UNPLANNED, ShardingMode, sharding_mode
from anabranch.planning import footprint
from anabranch.planning.footprint import (
    FLOAT_NBYTES,
    PAIR_NBYTES,
    Footprint,
    ReadyGradient,
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
from anabranch.tools.predict.scaling.sharding import block_of
from anabranch.values.kinds.formats import STORED
from anabranch.values.kinds.names import AUTO, COMPRESSED, DENSE, OKTOPK, two_level
from anabranch.values.sharded import Block

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
    for kind in (DENSE, OKTOPK, *COMPRESSED, AUTO):
        yield two_level(kind), TrainingMode(two_level(kind))


OUR_MODES: Mapping[str, TrainingMode] = dict(_named())  # those of ab.DataParallel, with an exchange of ours


def modes_of(exchange: str) -> list[str]:
    """The modes of one exchange, such as "oktopk", "auto" or "int8": in DataParallel, then on Lean if it is flat."""
    return [name for name, mode in OUR_MODES.items() if mode.exchange == exchange]


def predict(profile: StepProfile, mode: str, setting: Setting | None = None) -> Footprint:
    """Return the footprint at the moment of a step when most memory is in use, in the mode of this name."""
    setting = setting or Setting()
    if mode == NAIVE:
        return largest_footprint(_naive(profile, setting))
    if mode in UNPLANNED:
        return largest_footprint(_sharded(profile, setting, sharding_mode(mode)))
    known = {DDP: footprint.DDP, **OUR_MODES}
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


def _sharded(profile: StepProfile, setting: Setting, sharded: ShardingMode) -> Iterator[Footprint]:
    """The moments of a step. Gradients count as shards during the whole step."""
    ranks = setting.ranks_per_node or setting.ranks if sharded.nodes else setting.ranks
    shards = _shards(profile, setting, ranks)
    last = {block_of(gradient.name): index for index, gradient in enumerate(profile.gradients)}
    blocks = [block for block in sorted(last, key=lambda block: last[block], reverse=True) if block]
    nbytes = dict.fromkeys([*blocks, ""], 0)
    for gradient in profile.gradients:
        nbytes[block_of(gradient.name)] += gradient.nbytes
    units = [Block(block or REST_LABEL, nbytes[block], nbytes[block], 0.0, 0.0) for block in (*blocks, "")]
    done = 0  # gradients whose backward is over
    for (kind, unit), held in unsharded_at(units, host_order([sharded.units == RESHARD] * len(blocks), 1)):
        gathered = {"weights": held.parameters, "send": held.reducing, "receive": held.gathering}
        if kind == "forward" and unit == len(blocks) - 1:  # the last one; REST where there is no block
            yield shards.plus_use("end of forward", profile.gradients[0].peak_before._replace(gradients=0), **gathered)
        elif kind == "backward":
            end = last[blocks[unit]] + 1
            waiting = held.gradients - units[unit].gradient_nbytes
            for gradient in profile.gradients[done:end]:
                yield shards.plus_use(
                    until_gradient(gradient.name), gradient.peak_before, gradients=waiting, **gathered
                )
                waiting += gradient.nbytes if block_of(gradient.name) else 0
            done = end
        elif kind == "reduce" and unit != REST:
            use = profile.gradients[done - 1].when_ready._replace(gradients=0)
            yield shards.plus_use(f"reduction of {blocks[unit]}", use, gradients=held.gradients, **gathered)
    last_reduction_nbytes = units[0].gradient_nbytes if blocks else 0
    yield from _end(profile, shards, profile.gradients[done:], nbytes[""], last_reduction_nbytes)
    workspace = profile.optimizer.workspace_nbytes // ranks
    yield shards.plus_use("optimizer step", profile.after_backward, workspace=workspace)


def _shards(profile: StepProfile, setting: Setting, ranks: int) -> Footprint:
    """What is in memory during the whole step."""
    whole = constant_footprint(profile, setting).kinds
    shards = {kind: whole[kind] // ranks for kind in ("weights", "optimizer state")}
    shards |= {"gradients": profile.gradients_nbytes // ranks, "workspace": whole["workspace"]}
    return Footprint(shards, "")


def _end(
    profile: StepProfile,
    shards: Footprint,
    gradients: Sequence[ReadyGradient],
    rest_nbytes: int,
    last_reduction_nbytes: int,
) -> Iterator[Footprint]:
    """The last gradients and the reduction of what is in no block, whose weights are gathered for the whole step."""
    for gradient in gradients:
        gathered = {"weights": rest_nbytes, "gradients": rest_nbytes - gradient.nbytes, "send": last_reduction_nbytes}
        yield shards.plus_use(until_gradient(gradient.name), gradient.peak_before, **gathered)
    use = profile.after_backward._replace(gradients=0)
    yield shards.plus_use("reduction of the rest", use, gradients=rest_nbytes, send=rest_nbytes)
