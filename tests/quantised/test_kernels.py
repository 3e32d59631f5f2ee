"""The Triton kernels compute the bits of the torch operations: on a GPU, else in Triton's interpreter."""

import pytest
import torch

from quantised.worlds import gradients
from sparse.triton_device import DEVICE  # first: it sets the interpreter

from anabranch.quantised import torch_steps, triton_steps  # isort: skip
from anabranch.quantised.block_format import FORMATS, BlockFormat, Kept  # isort: skip


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit, but for the payload of NaN."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(1.0), other.nan_to_num(1.0))


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.kind)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("ranks", "numel"), [(1, 1), (1, 4097), (3, 63), (3, 1300), (2, 9000)])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter: some values are not finite
def test_every_step(form: BlockFormat, dtype: torch.dtype, ranks: int, numel: int, with_residual: bool) -> None:
    given = [values.to(DEVICE) for values in gradients(ranks, numel, seed=numel, dtype=dtype)]
    kept = [values.to(DEVICE) for values in gradients(ranks, numel, seed=numel + 2)]
    if numel == 9000:
        given[0][5], given[-1][4000] = float("nan"), float("inf")
    sent = []
    for values, residual in zip(given, kept, strict=True):
        own = residual if with_residual else None
        sent.append(torch_steps.quantise(values, own, ranks, form))
        assert torch.equal(triton_steps.quantise(values, own, ranks, form), sent[-1])
    messages, errors = [], []
    for owner in range(ranks):
        received = torch.stack([row[owner] for row in sent])
        message, error = torch_steps.reduce(received, ranks + 0.5, form)
        found, found_error = triton_steps.reduce(received, ranks + 0.5, form)
        assert torch.equal(found, message) and same(found_error, error)
        messages.append(message)
        errors.append(error)
    gathered = torch.stack(messages)
    for rank in range(ranks):
        results = []
        for run in (torch_steps, triton_steps):
            buffer, residual = given[rank].clone(), kept[rank].clone()
            kept_back = Kept(residual, sent[rank], errors[rank], rank, ranks + 0.5) if with_residual else None
            run.finish(gathered, buffer, form, kept_back)
            results.append((buffer, residual))
        (buffer, residual), (found_buffer, found_residual) = results
        if DEVICE.type == "cpu" and dtype == torch.bfloat16:  # Triton's interpreter does not round, and drops denormals
            torch.testing.assert_close(found_buffer, buffer, rtol=2**-7, atol=0, equal_nan=True)
            torch.testing.assert_close(found_residual, residual, rtol=0, atol=1e-37)
        else:
            assert same(found_buffer, buffer) and same(found_residual, residual)
