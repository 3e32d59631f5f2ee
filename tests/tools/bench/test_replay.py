"""The paced model: the sizes, the order and the times of the trace that it replays."""

import pytest
import torch

import anabranch as ab
from anabranch.observe.recorder import record
from anabranch.tools.bench import workload
from anabranch.tools.bench.workload import LONGEST_VECTOR, ReplayedModel


def trace(*ready_s: float, itemsize: int = 4) -> ab.Trace:
    tensors = [
        ab.TensorSpec(f"layer{i}.block.weight", 10 * (i + 1), itemsize, ready) for i, ready in enumerate(ready_s)
    ]
    return ab.Trace(tuple(tensors), 0.02)


def test_parameters_have_the_names_and_sizes_of_the_trace_in_forward_order() -> None:
    told = trace(0.0, 0.0, 0.0)
    found = [(name, p.numel(), p.element_size()) for name, p in ReplayedModel(told).named_parameters()]
    assert found == [(t.name, t.numel, t.itemsize) for t in reversed(told.tensors)]


def test_elements_have_the_recorded_width() -> None:
    for itemsize, dtype in ((2, torch.bfloat16), (4, torch.float32), (8, torch.float64)):
        model = ReplayedModel(trace(0.0, itemsize=itemsize))
        model().backward()
        (parameter,) = model.parameters()
        assert parameter.grad is not None and parameter.grad.dtype == dtype


def test_it_sleeps_as_long_as_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only sleeping moves."""
    now_s = 5.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(workload, "perf_counter", lambda: now_s)
    monkeypatch.setattr(workload, "sleep", sleep)
    told, seen = trace(0.01, 0.03, 0.03, 0.07), list[tuple[str, float]]()
    model = ReplayedModel(told)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append((name, now_s)))
    loss = model()
    assert now_s == pytest.approx(5.0 + told.forward_s)
    begun_s = now_s = 7.0
    loss.backward()
    assert [name for name, _ in seen] == [t.name for t in told.tensors]
    assert [at_s - begun_s for _, at_s in seen] == pytest.approx([t.ready_s for t in told.tensors])


def test_recording_it_gives_its_gradients_back() -> None:
    told = trace(0.0, 0.0, 0.001)
    model = ReplayedModel(told)
    seen = record(model, lambda: model().backward(), steps=3, warmup=1)
    assert [(t.name, t.nbytes) for t in seen.tensors] == [(t.name, t.nbytes) for t in told.tensors]
    assert seen.forward_s >= told.forward_s


def test_gradients_are_made_anew_and_are_the_same_in_every_step() -> None:
    model = ReplayedModel(trace(0.0, 0.0))
    model().backward()
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for p in model.parameters():
        assert p.grad is not None
        p.grad.zero_()  # must not reach what the next step hands out
        p.grad = None
    model().backward()
    for before, p in zip(first, model.parameters(), strict=True):
        assert p.grad is not None and before.abs().sum() > 0
        torch.testing.assert_close(p.grad, before, rtol=0, atol=0)


def test_gradients_accumulate() -> None:
    model = ReplayedModel(trace(0.0))
    model().backward()
    (p,) = model.parameters()
    assert p.grad is not None
    once = p.grad.clone()
    model().backward()
    torch.testing.assert_close(p.grad, 2 * once)


def test_seeds_differ_and_leave_torchs_own_generator_alone() -> None:
    state = torch.random.get_rng_state()
    models = [ReplayedModel(trace(0.0), seed) for seed in (0, 1)]
    assert torch.equal(state, torch.random.get_rng_state())
    for model in models:
        model().backward()
    one, other = (next(model.parameters()).grad for model in models)
    assert one is not None and other is not None and not torch.equal(one, other)


def test_an_unknown_width_is_refused() -> None:
    with pytest.raises(ValueError, match="elements of 3 bytes: expected one of 2, 4, 8"):
        ReplayedModel(trace(0.0, itemsize=3))


def test_what_is_too_long_for_a_vector_is_a_matrix() -> None:
    long, short = LONGEST_VECTOR + 1, LONGEST_VECTOR
    tensors = (ab.TensorSpec("long", long, 4, 0.0), ab.TensorSpec("short", short, 4, 0.0))
    shapes = {name: tuple(p.shape) for name, p in ReplayedModel(ab.Trace(tensors, 0.0)).named_parameters()}
    assert shapes == {"long": (long, 1), "short": (short,)}
