"""LaySA: what its abstract states, beside what was measured on a GPU and what the account of memory predicts."""

from importlib.util import find_spec

from benchmarks.papers.measurements import measurements
from benchmarks.papers.stand_in import bundled
from benchmarks.papers.table import OURS_ALONE, Figure, Reasons, Reproduction, Section

from anabranch.planning.footprint import MemoryUse, OptimizerMemory, ReadyGradient, Setting, StepProfile
from anabranch.tools.predict.memory.training_modes import DDP, LEAN, LEAN_INT8, NAIVE, predict

PAPER = "LaySA (Zhao, Liu, Wang, Feng: IEEE Access 2021)"
SOURCE = "the abstract, §3.1; models, GPUs, network, density and batch sizes are not available"
SAVED, FASTER, MORE = 80.5, 12.25, 150.0  # percent, of memory, of training time on one GPU, of throughput

MODELS = ("vgg16", "resnet152", "bert-large")
WITH_ACTIVATIONS = (("vgg16", 64), ("resnet50", 64))
MATRIX_NUMEL = 8192  # a trace knows no shapes: vectors, which never travel sparsely, are all smaller
SETTING = Setting(ranks=4, density=0.01)
MODEL_UNKNOWN = "LaySA's model and batch are not known"
NETWORK_UNKNOWN = "LaySA's network, model and batch are not known"
STAND_IN = "save_on_cpu, which waits for every tensor, stands in for the earlier system's memory reuse"


def reproduce() -> Reproduction:
    """The abstract's three figures, and what the account of memory predicts."""
    return Reproduction(PAPER, (headlines(), without_activations(), with_activations()))


def headlines() -> Section:
    """The abstract's three figures beside our measurements on a GPU."""
    measured = measurements()["lean"]
    save_on_cpu_ms = measured.value("resnet152_save_on_cpu_ms")
    model, network = Reasons(MODEL_UNKNOWN, MODEL_UNKNOWN), NETWORK_UNKNOWN
    figures = (
        model.compare("ResNet-152, batch 128", "memory saved over naive sparse", "%", SAVED,
                      measured.value("resnet152_memory_saved_percent")),
        Reasons(STAND_IN, STAND_IN).compare(
            "ResNet-152, one GPU", "time saved, offloaded, over save_on_cpu", "%", FASTER,
            _saved_percent(save_on_cpu_ms, measured.value("resnet152_offloaded_ms"))),
        Reasons(STAND_IN, f"{STAND_IN}; and the mix recomputes what is cheap").compare(
            "ResNet-152, one GPU", "time saved, a mix, over save_on_cpu", "%", FASTER,
            _saved_percent(save_on_cpu_ms, measured.value("resnet152_mix_ms"))),
        Reasons(network, f"{network}; here communication alone takes 6.6 s of a dense step").compare(
            "VGG-16, 16 GiB, 1 Gbit/s", "throughput gained over dense with reuse", "%", MORE,
            _gained_percent(measured.value("vgg16_throughput_ratio"))),
        Reasons(network, f"{network}; here communication alone takes 2.4 s of a dense step").compare(
            "Qwen2.5-0.5B, 16 GiB, 10 Gbit/s", "throughput gained over dense with reuse", "%", MORE,
            _gained_percent(measured.value("qwen_throughput_ratio"))),
    )  # fmt: skip
    how = (
        f"measured: {measured.source}, with naive sparse, torch's checkpointing and save_on_cpu beside it; "
        f"{measured.conditions}"
    )
    return Section("LaySA's figures", SOURCE, how, figures, (
        'the abstract says "up to 80.5 %", "about 12.25 %" and "more than 150 %"; the last may mean 1.5 or 2.5 times',
    ))  # fmt: skip


def _saved_percent(before: float, after: float) -> float:
    return 100 * (1 - after / before)


def _gained_percent(ratio: float) -> float:
    return 100 * (ratio - 1)


def without_activations() -> Section:
    """Peak memory without activations, predicted from sizes alone."""
    figures: list[Figure] = []
    for model in MODELS:
        peaks = {mode: predict(_parameters_only(model), mode, SETTING).nbytes for mode in (DDP, NAIVE, LEAN, LEAN_INT8)}
        figures.append(Figure(model, "naive sparse over dense", "×", None, peaks[NAIVE] / peaks[DDP], OURS_ALONE))
        for mode in (LEAN, LEAN_INT8):
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
        "predicted by anabranch.planning.footprint from the sizes in our traces: 4 ranks, 1 %, SGD with momentum; "
        "naive sparse: top-k with error feedback of the whole model after backward; not measured",
        tuple(figures),
        (f"gradients of more than {MATRIX_NUMEL:,} elements are taken for matrices, which may travel sparsely",),
    )


def _largest(model: str) -> float:
    """The largest gradient's share of all bytes."""
    trace = bundled(model)
    return max(tensor.nbytes for tensor in trace.tensors) / trace.nbytes


def _parameters_only(model: str) -> StepProfile:
    """The profile of a step without activations."""
    trace = bundled(model)
    gradients = tuple(
        ReadyGradient(t.name, t.numel, t.nbytes, MemoryUse(0, t.nbytes), MemoryUse(0, t.nbytes), t.numel > MATRIX_NUMEL)
        for t in trace.tensors
    )
    return StepProfile(trace.nbytes, gradients, MemoryUse(0), OptimizerMemory(state_nbytes=trace.nbytes))


def with_activations() -> Section:
    """Peaks of whole steps, run on tensors without data, where torchvision is installed."""
    figures: list[Figure] = []
    for model, batch in WITH_ACTIVATIONS:
        what = f"{LEAN_INT8}, activations recomputed: saved"
        if find_spec("torchvision") is None:
            word = "not predicted here: torchvision is not installed"
            figures.append(Figure(f"{model}, batch {batch}", what, "%", SAVED, None, word))
        else:
            word = "predicted, not measured; LaySA's model is not known"
            figures.append(Figure(f"{model}, batch {batch}", what, "%", SAVED, saved_percent(model, batch), word))
    return Section(
        "Memory of a whole step, Lean with residuals in int8 and activations recomputed",
        SOURCE,
        "predicted by anabranch.tools.predict.memory from a step on tensors without data: 4 ranks, 1 %, SGD with "
        "momentum, against naive sparse that keeps everything; not measured",
        tuple(figures),
    )


def saved_percent(model: str, batch: int) -> float:
    """How much less Lean is predicted to need than naive sparse, in percent."""
    from anabranch.tools.bench import zoo
    from anabranch.tools.predict.memory.estimator import OPTIMIZERS, with_recomputation
    from anabranch.tools.predict.memory.probe import probe

    build, optimizer = zoo.build_at(model, batch), OPTIMIZERS["momentum"]
    lean = predict(probe(with_recomputation(build), optimizer), LEAN_INT8, SETTING)
    naive = predict(probe(build, optimizer), NAIVE, SETTING)
    return 100 * (1 - lean.nbytes / naive.nbytes)
