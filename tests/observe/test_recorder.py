"""Traces from live models: order, names, sizes and instants, whatever the model returns and however it is run."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from anabranch import Trace
from anabranch.observe.clock import HostClock
from anabranch.observe.recorder import Recorder, record
from anabranch.observe.step_timer import StepTimer
from anabranch.tools.bench.zoo import IMAGES, MODELS, SEQUENCES, model_and_loss, model_and_step, trace_meta
from anabranch.values.files import dumps, loads

INPUT = torch.randn(3, 8)


class Chain(nn.Module):
    """Layers one after another, without number ``skip``."""

    def __init__(self, layers: int = 4, skip: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.skip = skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != self.skip:
                x = layer(x).relu()
        return x


def stepping(model: nn.Module) -> Callable[[], None]:
    """A step with a plain sum as its loss."""

    def step() -> None:
        model.zero_grad()
        model(INPUT).sum().backward()

    return step


def recorded(model: nn.Module) -> Trace:
    return record(model, stepping(model), steps=4, warmup=1)


def layer_order(trace: Trace) -> list[str]:
    """Which layers' gradients came, in order, each once: a weight and its bias are neighbours."""
    return list(dict.fromkeys(tensor.name.rpartition(".")[0] for tensor in trace.tensors))


def test_backward_order_names_sizes_and_instants() -> None:
    model = Chain()
    trace = recorded(model)
    assert layer_order(trace) == [f"layers.{i}" for i in (3, 2, 1, 0)]
    parameters = dict(model.named_parameters())
    assert {t.name: (t.numel, t.itemsize, t.dtype) for t in trace.tensors} == {
        name: (p.numel(), 4, "float32") for name, p in parameters.items()
    }
    instants = [tensor.ready_s for tensor in trace.tensors]
    assert instants == sorted(instants) and instants[0] >= 0 and trace.backward_s == instants[-1] > 0
    assert trace.forward_s > 0 and all(tensor.spread_s >= 0 for tensor in trace.tensors)
    assert trace.meta["steps"] == 4 and trace.meta["torch"] == torch.__version__
    assert loads(dumps(trace).encode(), "here") == trace


def test_meta_of_the_caller_is_kept_and_wins() -> None:
    trace = record(model := Chain(), stepping(model), steps=1, warmup=0, meta={"model": "chain", "device": "mine"})
    assert (trace.meta["model"], trace.meta["device"]) == ("chain", "mine")


def test_frozen_parameters_have_no_gradient_to_record_and_shared_ones_have_one() -> None:
    model = Chain()
    model.layers[1].requires_grad_(False)
    model.layers[2].weight = model.layers[0].weight
    names = [tensor.name for tensor in recorded(model).tensors]
    assert len(names) == len(set(names)) == 5
    assert not any(name.startswith("layers.1") for name in names)


def test_two_dtypes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.narrow(self.wide(x).bfloat16())
            return result

    kinds = {tensor.name: (tensor.dtype, tensor.itemsize) for tensor in recorded(Mixed()).tensors}
    assert kinds["narrow.weight"] == ("bfloat16", 2) and kinds["wide.weight"] == ("float32", 4)


def test_a_gradient_that_never_comes_is_last() -> None:
    trace = recorded(Chain(skip=2))
    assert layer_order(trace) == [f"layers.{i}" for i in (3, 1, 0, 2)]
    assert trace.tensors[-1].ready_s == trace.backward_s


class Alternating(nn.Module):
    """Two independent layers; which of them is called, and so differentiated, first changes from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.left, self.right = nn.Linear(8, 1), nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        first, second = (self.left, self.right) if self.calls % 2 else (self.right, self.left)
        result: torch.Tensor = self.head(second(first(x)))
        return result


def test_an_order_that_changes_is_warned_of_with_its_parameter() -> None:
    with pytest.warns(UserWarning, match=r"another order .* first at (left|right)\.(weight|bias)"):
        trace = recorded(Alternating())
    assert str(trace.meta["order_changed_at"]).startswith(("left", "right"))
    assert len(trace) == 6


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_keeps_the_order(reentrant: bool) -> None:
    class Checkpointed(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    model = Checkpointed()
    inputs = INPUT.clone().requires_grad_()
    trace = record(model, lambda: model(inputs).sum().backward(), steps=3, warmup=1)
    assert layer_order(trace) == [f"layers.{i}" for i in (3, 2, 1, 0)]


@dataclass
class Answer:
    """What some models return."""

    loss: torch.Tensor
    note: str = ""


@pytest.mark.parametrize(
    ("pack", "unpack"),
    [
        (lambda x: {"loss": x}, lambda out: out["loss"]),
        (lambda x: Answer(x), lambda out: out.loss),
        (lambda x: ("a", [x, None]), lambda out: out[1][0]),
    ],
    ids=["dict", "dataclass", "nested"],
)
def test_outputs_of_any_shape(pack: Callable[..., object], unpack: Callable[..., torch.Tensor]) -> None:
    class Packing(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return pack(super().forward(x).sum())  # type: ignore[return-value]

    model = Packing()
    trace = record(model, lambda: unpack(model(INPUT)).backward(), steps=3, warmup=1)
    assert layer_order(trace)[0] == "layers.3" and trace.forward_s > 0


def test_an_output_nobody_can_look_into_still_gives_an_order() -> None:
    class Sealed:
        def __init__(self, inside: torch.Tensor) -> None:
            self.inside = inside

    class Sealing(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Sealed(super().forward(x).sum())  # type: ignore[return-value]

    model = Sealing()
    trace = record(model, lambda: model(INPUT).inside.backward(), steps=3, warmup=1)
    assert layer_order(trace) == [f"layers.{i}" for i in (3, 2, 1, 0)]


def test_forwards_without_backward_do_not_count() -> None:
    model = Chain()

    def step() -> None:
        with torch.no_grad():
            model(INPUT)
        stepping(model)()

    assert record(model, step, steps=3, warmup=0).meta["steps"] == 3


def test_several_backwards_of_one_forward_are_one_step() -> None:
    model = Chain()

    def step() -> None:
        total = model(INPUT).sum()
        total.backward(retain_graph=True)
        total.backward()

    assert record(model, step, steps=3, warmup=0).meta["steps"] == 3


def test_gradients_are_untouched_and_hooks_are_gone_afterwards() -> None:
    model, twin = Chain(), Chain()
    twin.load_state_dict(model.state_dict())
    recorded(model)
    stepping(twin)()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))  # type: ignore[arg-type]
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_hooks_are_gone_after_a_step_that_failed() -> None:
    model = Chain()
    with pytest.raises(RuntimeError, match="does not require grad"):
        record(model, lambda: model(INPUT).detach().sum().backward(), steps=1, warmup=0)
    assert not model._forward_hooks and not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize(("steps", "warmup"), [(0, 1), (-1, 0), (1, -1)])
def test_bad_counts(steps: int, warmup: int) -> None:
    with pytest.raises(ValueError, match=f"steps is {steps} and warmup {warmup}"):
        record(Chain(), lambda: None, steps, warmup)


def test_nothing_to_record() -> None:
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        record(nn.ReLU(), lambda: None)
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        record(Chain().requires_grad_(False), lambda: None)
    with pytest.raises(ValueError, match="no step was recorded"):
        record(Chain(), lambda: None, steps=1, warmup=0)


def test_a_recorder_counts_the_steps_of_its_owner() -> None:
    model = Chain()
    timer = StepTimer(HostClock())
    first = next(model.parameters())  # its gradient comes among the last
    first.register_post_accumulate_grad_hook(lambda _: timer.gradients_averaged())
    with Recorder(timer, dict(model.named_parameters())) as recorder:
        for _ in range(3):
            timer.forward_begins()
            output = model(INPUT)
            timer.forward_ended(output)
            output.sum().backward()
        assert recorder.steps == 3
    assert layer_order(recorder.trace()) == [f"layers.{i}" for i in (3, 2, 1, 0)]


def test_a_language_model_of_the_zoo_has_its_size() -> None:
    pytest.importorskip("transformers")
    for name, millions in (("gpt2-medium", 355), ("llama-134m", 134), ("qwen2.5-0.5b", 494)):
        model, _ = model_and_loss(name, torch.device("meta"), 1)
        assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions


def test_the_zoo_names_what_it_lacks() -> None:
    with pytest.raises(ValueError, match=r"model is 'resnet51': expected one of googlenet, .*gpt2"):
        model_and_step("resnet51", torch.device("cpu"))
    assert set(MODELS) == {*IMAGES, *SEQUENCES}
    assert trace_meta("gpt2", half=True) == {
        "model": "gpt2",
        "batch": 8,
        "precision": "bf16 autocast, fp32 parameters and gradients",
        "optimizer": "none",
        "sequence_length": 512,
    }
    assert trace_meta("resnet50", batch=2)["batch"] == 2
