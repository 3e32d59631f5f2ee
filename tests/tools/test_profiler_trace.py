"""Profiles to traces: a real one of torch on the CPU, one like a GPU's, and files that are neither."""

import gzip
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile

from anabranch import FileError, Trace, simulate
from anabranch import planning as planners
from anabranch.tools.network_presets import NetworkRange
from anabranch.tools.profiler_trace import load_profiler_trace
from profiles import cuda_profile, slice_of, written

STEPS = 4


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, float]:
    """A small model on the CPU, profiled over a few steps of training, and the seconds that all of them took."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 10, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(32, 64)
    began = perf_counter()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    took_s = perf_counter() - began
    path = tmp_path_factory.mktemp("profile") / "cpu.json"
    profiler.export_chrome_trace(str(path))
    return path, model, took_s


def test_a_real_cpu_profile(recorded: tuple[Path, nn.Module, float]) -> None:
    path, model, took_s = recorded
    trace = load_profiler_trace(path, "small", 32)
    assert sorted(t.numel for t in trace.tensors) == sorted(p.numel() for p in model.parameters())
    assert trace.tensors[0].numel == 1280  # the last layer's gradient comes first
    assert trace.tensors[-1].numel in (128, 64 * 128)
    assert {t.dtype for t in trace.tensors} == {"float32"}
    assert trace.forward_s > 0 and 0 < trace.tensors[0].ready_s < trace.backward_s
    assert trace.forward_s + trace.backward_s < took_s, "seconds, of a step among several"
    assert trace.meta["steps"] == STEPS and trace.meta["model"] == "small" and trace.meta["batch"] == 32
    assert "names of parameters" in str(trace.meta["not_known"])
    network = NetworkRange.preset("10gbe", 8).middle
    assert simulate(trace, planners.optimal(trace, network), network).iteration_s > trace.backward_s


def test_a_zipped_profile_is_the_same(recorded: tuple[Path, nn.Module, float], tmp_path: Path) -> None:
    packed = tmp_path / "cpu.json"
    packed.write_bytes(gzip.compress(recorded[0].read_bytes()))
    assert load_profiler_trace(packed) == load_profiler_trace(recorded[0])


@pytest.mark.parametrize("ddp", [False, True], ids=["alone", "beside NCCL"])
def test_a_gpus_gradients_are_ready_when_its_kernels_are(ddp: bool, tmp_path: Path) -> None:
    trace = load_profiler_trace(written(cuda_profile(ddp=ddp), tmp_path))
    assert [t.ready_s for t in trace.tensors] == pytest.approx([100e-6, 300e-6])
    assert trace.forward_s == pytest.approx(310e-6)
    assert [(t.numel, t.itemsize) for t in trace.tensors] == [(32, 4), (8, 4)]
    assert trace.meta["device"] == "NVIDIA H200" and trace.meta["world_size"] == 4 and trace.meta["steps"] == 3


def test_a_step_with_other_gradients_is_left_out(tmp_path: Path) -> None:
    document = cuda_profile(steps=4)
    odd = next(e for e in document["traceEvents"] if e["name"] == "torch::autograd::AccumulateGrad")
    odd["args"]["Input Dims"] = [[99]]
    trace = load_profiler_trace(written(document, tmp_path))
    assert trace.meta["steps"] == 3 and "1 more had other gradients" in str(trace.meta["assumed"])
    assert all(t.numel != 99 for t in trace.tensors)


def test_operations_computed_again_in_backward_do_not_end_it(tmp_path: Path) -> None:
    document = cuda_profile(steps=1)
    document["traceEvents"].append(slice_of("aten::mm", "cpu_op", 246, 2, 2, Sequence_number=9, Fwd_thread_id=0))
    assert len(load_profiler_trace(written(document, tmp_path))) == 2


def refusal(content: bytes, folder: Path) -> str:
    path = folder / "profile.json"
    path.write_bytes(content)
    with pytest.raises(FileError) as caught:
        load_profiler_trace(path)
    assert "profile.json" in str(caught.value)
    return str(caught.value)


def edited(**changes: Any) -> bytes:
    """A profile whose first AccumulateGrad differs."""
    document = cuda_profile(1)
    event = next(e for e in document["traceEvents"] if e["name"] == "torch::autograd::AccumulateGrad")
    event.update(changes)
    return json.dumps(document).encode()


def test_broken_files_are_named(tmp_path: Path) -> None:
    cases: list[tuple[bytes, str]] = [
        (b"", "not valid JSON"),
        (b'{"traceEvents": [', "not valid JSON"),
        (b"\xff\xfe{", "not valid JSON"),
        (b"[" * 100_000, "recursion depth"),
        (b"{}", "expected a list of events"),
        (b'{"traceEvents": {"a": 1}}', "expected a list of events"),
        (b"3", "expected a list of events"),
        (b"[]", "has no backward"),
        (b'{"traceEvents": [1, null, {"ph": "X", "ts": 1}]}', "has no backward"),
        (b"\x1f\x8bnothing", "is the file whole?"),
        (gzip.compress(b"[]" * 1000, mtime=0)[:-12], "is the file whole?"),
        (edited(ts="soon"), "expected microseconds"),
        (edited(ts=None), "expected microseconds"),
        (edited(dur=-1), "expected microseconds"),
        (edited(ts=10**400), "expected microseconds"),
        (edited(args={"Input Dims": [[2, -3]], "Input type": ["float"]}), "the shape [2, -3]"),
        (edited(args={"Input Dims": [["x"]], "Input type": ["float"]}), "whole numbers"),
        (edited(args={"Input Dims": [[2]], "Input type": ["\x1b[2Jint"]}), "the type '\\x1b[2Jint'"),
        (edited(args={"Input Dims": [[1 << 60]], "Input type": ["float"]}), "2**53"),
        (json.dumps(cuda_profile(1, shapes=False)).encode(), "record_shapes=True"),
    ]
    for content, word in cases:
        assert word in refusal(content, tmp_path)


def test_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.tools.profiler_trace.MAX_NBYTES", 1 << 20)
    assert "profile fewer steps" in refusal(b"[" + b" " * (2 << 20) + b"]", tmp_path)
    assert "profile fewer steps" in refusal(gzip.compress(b" " * (64 << 20)), tmp_path)  # 64 KiB that would be 64 MiB
    with pytest.raises(FileError, match="cannot be read"):
        load_profiler_trace(tmp_path / "none.json")


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)


@given(data=st.data())
def test_no_damage_ends_in_anything_but_a_trace_or_an_error(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    document = cuda_profile(2, ddp=True)
    for _ in range(data.draw(st.integers(1, 4))):
        event = data.draw(st.sampled_from(document["traceEvents"]))
        where = event["args"] if event["args"] and data.draw(st.booleans()) else event
        where[data.draw(st.sampled_from(sorted(where)))] = data.draw(values)
        if not isinstance(event.get("args"), dict):
            event["args"] = {}
    try:
        assert isinstance(load_profiler_trace(written(document, tmp_path_factory.mktemp("damaged"))), Trace)
    except FileError as error:
        assert "profile.json" in str(error)
