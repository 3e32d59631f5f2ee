"""Our recorded traces as substitutes for those of the papers, which are not public."""

from dataclasses import replace
from functools import cache
from importlib import resources
from typing import NamedTuple

from anabranch.values.errors import FileError
from anabranch.values.files import loads
from anabranch.values.trace import TensorSpec, Trace

FORWARD_SHARE = 1 / 3  # the authors of MG-WFBP and ASC-WFBP take forward to last half as long as backward


class StandIn(NamedTuple):
    """A bundled trace for a published model; ``numel``: of the published model, where the recorded one has others."""

    trace: str
    numel: int | None = None

    def with_durations(self, forward_s: float, backward_s: float, itemsize: int = 4) -> Trace:
        """The trace with these durations; gradients keep their relative times, and are scaled to ``numel`` in total."""
        recorded = bundled(self.trace)
        longer = backward_s / recorded.backward_s
        larger = 1.0 if self.numel is None else self.numel / sum(tensor.numel for tensor in recorded.tensors)
        tensors = (
            replace(
                tensor,
                numel=round(tensor.numel * larger),
                itemsize=itemsize,
                dtype="" if itemsize != tensor.itemsize else tensor.dtype,
                ready_s=tensor.ready_s * longer,
                spread_s=0.0,
            )
            for tensor in recorded.tensors
        )
        return replace(recorded, tensors=tuple(tensors), forward_s=forward_s)

    def with_compute_s(self, compute_s: float, itemsize: int = 4) -> Trace:
        """The trace with this compute time, a third of it forward."""
        return self.with_durations(FORWARD_SHARE * compute_s, (1 - FORWARD_SHARE) * compute_s, itemsize)


# The public models by their published names. Inception-v4 has not been recorded.
RESNET50 = StandIn("resnet50")
RESNET152 = StandIn("resnet152")
DENSENET161 = StandIn("densenet161")
DENSENET201 = StandIn("densenet201")
INCEPTION_V4 = StandIn("inception_v3", 42_679_816)
BERT_BASE = StandIn("bert-base", 110_111_042)
BERT_LARGE = StandIn("bert-large")
GOOGLENET = StandIn("googlenet")

SUBSTITUTES = (
    "Inception-v4 has no recorded trace: Inception-v3's stands in, its gradients enlarged alike to 42,679,816 elements"
)


def by_layer(trace: Trace) -> Trace:
    """The trace with one entry per layer, as in Caffe: a convolution with its normalisation, a weight with its bias."""
    layers: dict[str, list[TensorSpec]] = {}
    for tensor in trace.tensors:
        layer = tensor.name.rpartition(".")[0].removesuffix(".conv").removesuffix(".bn")
        layers.setdefault(layer, []).append(tensor)
    units = [replace(parts[-1], name=layer, numel=sum(part.numel for part in parts)) for layer, parts in layers.items()]
    return replace(trace, tensors=tuple(sorted(units, key=lambda unit: unit.ready_s)))


@cache
def bundled(name: str) -> Trace:
    """The trace of this name that comes with the package."""
    noun = loads(
        (resources.files("anabranch.values") / "traces" / f"{name}.json").read_bytes(), f"bundled trace {name}"
    )
    if not isinstance(noun, Trace):
        raise FileError(f"bundled trace {name}: holds a {type(noun).__name__.lower()}, expected a trace")
    return noun
