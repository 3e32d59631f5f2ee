"""anabranch memory: what a model holds in memory, trained in every way; the largest batch that fits, and how fast."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import arguments, network_text, user_function
from anabranch.cli.output import JsonOption, print_json, show_tables
from anabranch.network_presets import PRESETS
from anabranch.scaling.throughput import ASSUMPTIONS, samples_per_s

if TYPE_CHECKING:
    import torch
    from torch import nn

    from anabranch.estimate.account import Footprint, Setting
    from anabranch.estimate.probe import Build, Loss
    from anabranch.network import Network
    from anabranch.report.documents import MemoryDocument

MAX_NBYTES = 2.0**60  # no machine has as much
SIZE_NBYTES: Mapping[str, float] = {"gib": 2.0**30, "mib": 2.0**20, "gb": 1e9, "mb": 1e6}
RATE_ALPHA = "30us"
DDPS_BUCKETS = "25 MiB in the order of backward"
# What torch's allocator has but cannot use, because its free pieces are too small.
FRAGMENTED = 0.05


class Optimizer(StrEnum):
    """What remembers how much: nothing, one number per parameter, or two."""

    sgd = "sgd"
    momentum = "momentum"
    adamw = "adamw"


class Activations(StrEnum):
    """Where activations are between forward and backward."""

    keep = "keep"
    offload = "offload"
    recompute = "recompute"


EXAMPLE = "module:function, where function(batch, device) returns a model and its loss as a function of the model"
ModelOption = Annotated[
    str, typer.Option(help="Of torchvision or transformers, such as resnet152 or gpt2; or your own, module:function.")
]
BatchOption = Annotated[int, typer.Option("--batch-size", min=1, help="Images or sequences per rank.")]
RanksOption = Annotated[int | None, typer.Option(min=1, help="How many ranks; 4 unless a network says.")]
DensityOption = Annotated[float, typer.Option(help="Which share of the gradients the sparse ways send.")]
OptimizerOption = Annotated[Optimizer, typer.Option(help="Whose state to count.")]
ActivationsOption = Annotated[Activations, typer.Option(help="In which way lean keeps activations.")]
WithinOption = Annotated[str | None, typer.Option(metavar="SIZE", help="Find the largest batch in this: 16GiB.")]
NetworkOption = Annotated[str | None, typer.Option(metavar="N", help="For throughput: a network, as in scale.")]
RateOption = Annotated[str | None, typer.Option(help="Instead of a network: a ring of links of this rate, 10gbit.")]
TraceOption = Annotated[str | None, typer.Option(metavar="T", help="For throughput: a trace, where none is bundled.")]
PlanOption = Annotated[Path | None, typer.Option(help="In whose buckets oktopk and lean exchange; else 25 MiB each.")]
MeasureOption = Annotated[bool, typer.Option("--measure", help="Also run a few steps of each way on this GPU.")]


def memory(
    model: ModelOption,
    batch_size: BatchOption,
    ranks: RanksOption = None,
    density: DensityOption = 0.01,
    optimizer: OptimizerOption = Optimizer.momentum,
    activations: ActivationsOption = Activations.keep,
    within: WithinOption = None,
    network: NetworkOption = None,
    rate: RateOption = None,
    trace: TraceOption = None,
    plan: PlanOption = None,
    measure: MeasureOption = False,
    as_json: JsonOption = False,
) -> None:
    """Predict peak memory by kind of object: for DDP, naive sparse, Ok-Topk and Lean; the largest batch that fits."""
    limit_nbytes = within_nbytes(within)
    wire = _network(network, rate, ranks)
    ranks = ranks or (wire.world_size if wire else 4)
    from anabranch.estimate.account import Setting
    from anabranch.report.documents import MemoryDocument, MemoryMode, printed

    if plan is not None and measure:
        raise ValueError(f"--plan is {plan}, and --measure runs buckets of 25 MiB: expected one of them")
    buckets = None if plan is None else [bucket.names for bucket in arguments.plan(plan).buckets]
    setting = Setting(ranks=ranks, density=density, buckets=buckets)
    account = Account(model, optimizer, activations, DDPS_BUCKETS if plan is None else f"those of {plan}")
    footprints = account.at(batch_size, setting)
    measured = _measured(model, batch_size, optimizer, activations, setting) if measure else {}
    assumptions = list(account.assumptions)
    batches = dict.fromkeys(footprints, batch_size)
    if limit_nbytes is not None:
        from anabranch.estimate.largest_batch import MOST

        batches = {mode: account.largest(mode, setting, limit_nbytes) for mode in footprints}
        assumptions.append(f"{FRAGMENTED:.0%} of the memory is lost between torch's blocks")
        if max(batches.values()) == MOST:
            assumptions.append(f"no batch above {MOST} was looked at")
    speeds = None
    if wire is not None:
        ways = {mode: account.way(mode) for mode in batches}
        speeds = _speeds(trace or model, wire, batches, density, ways, assumptions)
    modes = {
        mode: MemoryMode(
            kinds=dict(footprint.kinds),
            predicted_nbytes=footprint.nbytes,
            at=footprint.at,
            host_nbytes=footprint.host,
            measured_nbytes=measured.get(mode),
        )
        for mode, footprint in footprints.items()
    }
    document = MemoryDocument(
        model=model,
        batch_size=batch_size,
        ranks=ranks,
        density=density,
        optimizer=optimizer.value,
        activations=activations.value,
        assumptions=tuple(assumptions),
        modes=modes,
        within_nbytes=limit_nbytes,
        largest_batch=batches if limit_nbytes is not None else None,
        samples_per_s=speeds,
    )
    if as_json:
        print_json(printed(document))
    else:
        _print(document)


class Account:
    """Footprints of one model at any batch; each batch is run on tensors without data once."""

    def __init__(self, model: str, optimizer: Optimizer, activations: Activations, buckets: str = DDPS_BUCKETS) -> None:
        from anabranch.estimate.probe import CONVOLUTION_WORKSPACE, probe

        factory, build_of = _factory(optimizer), _builder(model)
        self._activations = activations

        @cache
        def profile(batch: int, activations: Activations) -> Any:
            build = build_of(batch)
            build = _recomputed(build) if activations is Activations.recompute else build
            return probe(build, factory, offload=activations is Activations.offload)

        self._profile = profile
        self.assumptions = [
            "the model in the type it is built in" if ":" in model else "float32, as in torchvision or transformers",
            "operations keep what they keep on a GPU",
            f"cuDNN takes {CONVOLUTION_WORKSPACE:g} times the bytes of a convolution's tensors, cuBLAS 64 MiB",
            "what NCCL, the CUDA context and fragmentation take is not counted",
            f"buckets: {buckets}; naive sparse exchanges the whole model after backward",
        ]
        if activations is Activations.offload:
            self.assumptions.append("lean's activations are fetched one by one; prefetching keeps some more")

    def at(self, batch: int, setting: "Setting") -> "dict[str, Footprint]":
        """Every mode at one batch."""
        from anabranch.estimate.account import MODES, predict

        return {mode: predict(self._profile(batch, self.way(mode)), mode, setting) for mode in MODES}

    def largest(self, mode: str, setting: "Setting", limit_nbytes: int) -> int:
        """The largest batch of a mode within the limit."""
        from anabranch.estimate.account import predict
        from anabranch.estimate.largest_batch import largest_batch

        def nbytes(batch: int) -> int:
            return predict(self._profile(batch, self.way(mode)), mode, setting).nbytes

        return largest_batch(nbytes, int(limit_nbytes * (1 - FRAGMENTED)))

    def way(self, mode: str) -> Activations:
        """What a mode does with activations: only lean's do anything."""
        return self._activations if mode.startswith("lean") else Activations.keep


def _builder(model: str) -> "Callable[[int], Build]":
    """By batch, what makes the model; a function of the user's own is looked up once."""
    if ":" in model:
        function = user_function.function(model, EXAMPLE)
        second = "loss): a torch module and a function of it"
        return lambda batch: lambda device: user_function.checked(model, function(batch, device), second)
    from anabranch.bench.memory import of_zoo

    return partial(of_zoo, model)


def _recomputed(build: "Build") -> "Build":
    """The same model, whose blocks are computed again in backward."""
    from anabranch.activations.recompute import recompute

    def rebuilt(device: "torch.device") -> "tuple[nn.Module, Loss]":
        model, loss = build(device)
        recompute(model)
        return model, loss

    return rebuilt


def _factory(optimizer: Optimizer) -> Any:
    from anabranch.bench.memory import OPTIMIZERS

    return OPTIMIZERS[optimizer.value]


def _measured(
    model: str, batch: int, optimizer: Optimizer, activations: Activations, setting: "Setting"
) -> dict[str, int]:
    """The allocator's peak of each mode that can run here."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--measure runs the model on a GPU, and torch finds none here: leave it out")
    from anabranch.activations import policy
    from anabranch.bench.memory import peak, runnable, world

    with world() as ranks:
        if ranks not in (1, setting.ranks):
            raise ValueError(f"--measure runs on {ranks} ranks and --ranks is {setting.ranks}: leave out --ranks")
        build, factory, treated = _builder(model)(batch), _factory(optimizer), policy.Activations(activations.value)
        return {mode: peak(build, mode, factory, setting.ranks, setting.density, treated).steady for mode in runnable()}


def _speeds(
    name: str,
    network: "Network",
    batches: Mapping[str, int],
    density: float,
    ways: Mapping[str, Activations],
    assumptions: list[str],
) -> dict[str, float]:
    """Samples per second of each mode at its batch, with activations its way; nothing for a model without a trace.

    Nor for a mode with all activations offloaded: the link to the host is slower than computing, and not in a trace.
    """
    if name not in arguments.bundled() and not Path(name).is_file():
        assumptions.append(f"no throughput: anabranch brings no trace of {name}; record one, and give it by --trace")
        return {}
    trace = arguments.trace(name)
    assumptions += ASSUMPTIONS
    if Activations.recompute in ways.values():
        assumptions.append("lean's forward runs twice")
    if Activations.offload in ways.values():
        assumptions.append("no throughput of lean: its activations wait for the link to the host, which no trace knows")
    return {
        mode: samples_per_s(trace, network, mode, batch, density, ways[mode] is Activations.recompute)
        for mode, batch in batches.items()
        if batch and ways[mode] is not Activations.offload
    }


def within_nbytes(text: str | None) -> int | None:
    """What --within says, in bytes."""
    if text is None:
        return None
    nbytes = network_text.quantity(text, SIZE_NBYTES)
    if not 1 <= nbytes <= MAX_NBYTES:
        raise ValueError(f"--within is {text!r}: expected a size in GiB, MiB, GB or MB, such as 16GiB")
    return int(nbytes)


def _network(text: str | None, rate: str | None, ranks: int | None) -> "Network | None":
    if text is not None and rate is not None:
        raise ValueError(f"--network is {text} and --rate is {rate}: expected one of them")
    if rate is not None:
        return network_text.network(f"ring:ranks={ranks or 4},alpha={RATE_ALPHA},rate={rate}")
    if text is None:
        return None
    network = arguments.network(f"{text}:ranks={ranks or 4}" if text in PRESETS else text)
    return network if ranks is None else network.at(ranks)


def _print(found: "MemoryDocument") -> None:
    from rich.text import Text

    from anabranch.report.formatting import plain, size
    from anabranch.report.memory import batch_report, memory_report

    modes = found.modes
    title = f"{found.model}, batch {found.batch_size}, {found.optimizer}, {found.ranks} ranks"
    parts: list[Any] = [
        memory_report(
            title,
            {mode: peak.kinds for mode, peak in modes.items()},
            {mode: peak.host_nbytes for mode, peak in modes.items()},
            {mode: peak.measured_nbytes for mode, peak in modes.items() if peak.measured_nbytes is not None},
        )
    ]
    rows: dict[str, dict[str, str]] = {}
    if found.largest_batch is not None:
        rows["largest batch per rank"] = {mode: str(batch) for mode, batch in found.largest_batch.items()}
    if found.samples_per_s:
        rows["samples/s, all ranks"] = {mode: f"{speed:.1f}" for mode, speed in found.samples_per_s.items()}
    if rows:
        where = f"Within {size(found.within_nbytes)}" if found.within_nbytes is not None else "At this batch"
        parts.append(batch_report(where, list(modes), rows))
    parts.append(Text(plain(f"Assumed: {'; '.join(found.assumptions)}.")))
    show_tables(*parts)
