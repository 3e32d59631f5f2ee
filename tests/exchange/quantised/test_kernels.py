"""The Triton kernels compute the bits of the torch operations: on a GPU, else in Triton's interpreter."""

import pytest
import torch

from anabranch.exchange.quantised import torch_steps
from exchange.quantised.worlds import gradients
from exchange.sparse.triton_device import DEVICE  # first: it sets the interpreter

from anabranch.exchange.quantised import triton_steps  # isort: skip
from anabranch.values.kinds.formats import FORMATS, STORED, BlockFormat  # isort: skip
from anabranch.exchange.quantised.torch_steps import Kept  # isort: skip


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit, but for the payload of NaN."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(1.0), other.nan_to_num(1.0))


def same_messages(one: torch.Tensor, other: torch.Tensor, form: BlockFormat) -> bool:
    """Byte by byte, but for the payload of NaN among values in bfloat16."""
    return torch.equal(one, other) if form.scaled else same(one.view(torch.bfloat16), other.view(torch.bfloat16))


@pytest.mark.parametrize(
    ("form", "seed"),  # only what is stored is rounded at random
    [*((form, None) for form in (*FORMATS.values(), STORED["int8"])), *((form, 3) for form in STORED.values())],
    ids=[*FORMATS, "stored int8", "bf16 at random", "int8 at random"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("ranks", "numel"), [(1, 1), (1, 4097), (3, 63), (3, 1300), (2, 9000)])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter: some values are not finite
def test_every_step(
    form: BlockFormat, dtype: torch.dtype, ranks: int, numel: int, with_residual: bool, seed: int | None
) -> None:
    given = [values.to(DEVICE) for values in gradients(ranks, numel, seed=numel, dtype=dtype)]
    kept = [values.to(DEVICE) for values in gradients(ranks, numel, seed=numel + 2)]
    interpreted = DEVICE.type == "cpu" and dtype == torch.bfloat16
    if interpreted:  # Triton's interpreter does not round to bfloat16, and drops its denormals
        given = [torch.where(values.abs() < 1e-37, 0.0, values) for values in given]
    if numel == 9000:
        given[0][5], given[-1][4000], given[-1][4001] = float("nan"), float("inf"), -float("inf")
    sent = []
    for values, residual in zip(given, kept, strict=True):
        own = residual if with_residual else None
        sent.append(torch_steps.quantise(values, own, ranks, form, seed))
        assert same_messages(triton_steps.quantise(values, own, ranks, form, seed), sent[-1], form)
    messages, errors = [], []
    for owner in range(ranks):
        received = torch.stack([row[owner] for row in sent])
        message, error = torch_steps.reduce(received, ranks + 0.5, form, with_residual)
        found, found_error = triton_steps.reduce(received, ranks + 0.5, form, with_residual)
        assert same_messages(found, message, form)
        if with_residual:
            assert error is not None and found_error is not None and same(found_error, error)
        else:
            assert error is found_error is None, "nobody keeps it"
        messages.append(message)
        errors.append(error)
    gathered = torch.stack(messages)
    for rank, error in enumerate(errors):
        results = []
        for run in (torch_steps, triton_steps):
            buffer, residual = given[rank].clone(), kept[rank].clone()
            kept_back = None if error is None else Kept(residual, sent[rank], error, rank, ranks + 0.5)
            run.finish(gathered, buffer, form, kept_back)
            results.append((buffer, residual))
        (buffer, residual), (found_buffer, found_residual) = results
        if interpreted:
            torch.testing.assert_close(found_buffer, buffer, rtol=2**-7, atol=1e-37, equal_nan=True)
            torch.testing.assert_close(found_residual, residual, rtol=0, atol=1e-37)
        else:
            assert same(found_buffer, buffer) and same(found_residual, residual)


@pytest.mark.parametrize("form", STORED.values(), ids=STORED)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_stored_is_the_same_after_it_is_read_and_stored_again(form: BlockFormat) -> None:
    values = gradients(1, 1000, seed=7)[0].to(DEVICE)
    values[:128] *= 127.0 / values[:128].abs().max()  # a block whose scale is 1
    values[128:256] *= 127.001 / values[128:256].abs().max()  # and one whose scale is just above
    for run in (torch_steps, triton_steps):
        read = [values, *(torch.empty_like(values) for _ in range(3))]
        for before, after, seed in zip(read, read[1:], (5005, 5006, 5007), strict=False):  # of no position: chance 0
            run.finish(run.quantise(before, None, 1, form, seed), after, form)
        assert not same(values, read[1])
        assert same(read[1], read[2]) and same(read[2], read[3])
        if form.scaled:
            assert (read[1] - values)[:128].abs().max() < 1.0, "below a step of the scale"
            assert 1.0 < (read[1] - values)[128:256].abs().max() < 2.0
