"""LaySA: what its abstract states, beside predicted memory; nothing of it has been measured here yet."""

from importlib.util import find_spec

from anabranch.memory.account import DDP, LEAN, LEAN_HOST, NAIVE, Setting, predict
from anabranch.memory.profile import Arrival, Moment, OptimizerCost, Profile
from anabranch.reproduce.stand_in import bundled
from anabranch.reproduce.table import OURS_ALONE, Figure, Reproduction, Section

PAPER = "LaySA (Zhao, Liu, Wang, Feng: IEEE Access 2021)"
SOURCE = "the abstract, §3.1; models, GPUs, network, density and batch sizes are not available"
SAVED, FASTER, MORE = 80.5, 12.25, 150.0  # percent, of memory, of training time on one GPU, of throughput

MODELS = ("vgg16", "resnet152", "bert-large")
WITH_ACTIVATIONS = (("vgg16", 64), ("resnet50", 64))
MATRIX_NUMEL = 8192  # a trace knows no shapes: vectors, which never travel sparsely, are all smaller
SETTING = Setting(ranks=4, density=0.01)
NOT_MEASURED = "not measured yet: Lean has run on CPUs only, benchmarks/ has no GPU report of it"


def reproduce() -> Reproduction:
    """The abstract's three figures, and what the account of memory predicts."""
    return Reproduction(PAPER, (headlines(), without_activations(), with_activations()))


def headlines() -> Section:
    """What only a GPU can tell."""
    figures = (
        Figure("best model", "memory saved", "%", SAVED, None, NOT_MEASURED),
        Figure("one GPU", "training time saved", "%", FASTER, None, NOT_MEASURED),
        Figure("largest batch", "throughput gained", "%", MORE, None, NOT_MEASURED),
    )
    return Section("LaySA's figures", SOURCE, "nothing: see the words", figures, (
        'the abstract says "up to 80.5 %", "about 12.25 %" and "more than 150 %"; the last may mean 1.5 or 2.5 times',
    ))  # fmt: skip


def without_activations() -> Section:
    """Everything that sparsity adds, and Lean takes away again, predicted from sizes alone."""
    figures: list[Figure] = []
    for model in MODELS:
        peaks = {mode: predict(_parameters_only(model), mode, SETTING).nbytes for mode in (DDP, NAIVE, LEAN, LEAN_HOST)}
        figures.append(Figure(model, "naive sparse over dense", "×", None, peaks[NAIVE] / peaks[DDP], OURS_ALONE))
        for mode in (LEAN, LEAN_HOST):
            saved = 100 * (1 - peaks[mode] / peaks[NAIVE])
            word = (
                OURS_ALONE
                if saved > 0
                else f"none: slots hold the largest gradient, {_largest(model):.0%} of the model"
            )
            figures.append(Figure(model, f"{mode}: saved over naive sparse", "%", None, saved, word))
    return Section(
        "Memory beside activations: weights, gradients, residual, optimizer state, messages, workspace",
        "nothing to compare: LaySA's 80.5 % include activations",
        "predicted by anabranch.memory.account from the sizes in our traces: 4 ranks, 1 %, SGD with momentum; naive "
        "sparse: top-k with error feedback of the whole model after backward; not measured",
        tuple(figures),
        (f"gradients of more than {MATRIX_NUMEL:,} elements are taken for matrices, which may travel sparsely",),
    )


def _largest(model: str) -> float:
    """Which share of all bytes is in one gradient."""
    trace = bundled(model)
    return max(tensor.nbytes for tensor in trace.tensors) / trace.nbytes


def _parameters_only(model: str) -> Profile:
    """A step that holds nothing but what belongs to parameters."""
    trace = bundled(model)
    arrivals = tuple(
        Arrival(t.name, t.numel, t.nbytes, Moment(0, t.nbytes), Moment(0, t.nbytes), t.numel > MATRIX_NUMEL)
        for t in trace.tensors
    )
    return Profile(trace.nbytes, arrivals, Moment(0), OptimizerCost(state=trace.nbytes))


def with_activations() -> Section:
    """Peaks of whole steps, run on tensors without data, where torchvision is installed."""
    figures: list[Figure] = []
    for model, batch in WITH_ACTIVATIONS:
        what = f"{LEAN_HOST}, activations too: saved"
        if find_spec("torchvision") is None:
            word = "not predicted here: torchvision is not installed"
            figures.append(Figure(f"{model}, batch {batch}", what, "%", SAVED, None, word))
        else:
            word = "predicted, not measured; LaySA's model is not known"
            figures.append(Figure(f"{model}, batch {batch}", what, "%", SAVED, saved_percent(model, batch), word))
    return Section(
        "Memory of a whole step, Lean with residuals and activations in host memory",
        SOURCE,
        "predicted by anabranch.memory from a step on tensors without data: 4 ranks, 1 %, SGD with momentum, against "
        "naive sparse that keeps everything; not measured",
        tuple(figures),
    )


def saved_percent(model: str, batch: int) -> float:
    """Of naive sparse's predicted peak."""
    from anabranch.bench import memory as ways
    from anabranch.memory.probe import probe

    def step(offload: bool) -> Profile:
        return probe(lambda device: ways.built(model, device, batch), ways.OPTIMIZERS["momentum"], offload=offload)

    lean, naive = predict(step(True), LEAN_HOST, SETTING), predict(step(False), NAIVE, SETTING)
    return 100 * (1 - lean.nbytes / naive.nbytes)
