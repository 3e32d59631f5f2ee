"""Residuals that one stream has allocated and another one reads last: nobody else gets their memory in between."""

from collections.abc import Callable

import pytest
import torch

from anabranch.exchange.residuals import bucket_states
from anabranch.exchange.residuals.bucket_states import BucketStates

NUMEL = 1 << 16
CPU = torch.device("cpu")


def saved(device: torch.device) -> dict[str, object]:
    """A checkpoint of one bucket, whose tensors are on this device."""
    first = BucketStates(0, 2, device)
    bucket = first.bucket(["weight"], [NUMEL])
    bucket.residual.fill_(3.0)
    bucket.fresh = False
    return first.state_dict()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Where the tensors lie whose streams were recorded."""
    found: set[int] = set()

    def record(*tensors: torch.Tensor) -> None:
        found.update(tensor.data_ptr() for tensor in tensors)

    monkeypatch.setattr(bucket_states, "record_stream", record)
    return found


def test_whoever_drops_a_piece_records_its_stream(recorded: set[int]) -> None:
    loaded = BucketStates(0, 2, CPU)
    loaded.load_state_dict(saved(CPU))
    piece = loaded.unbucketed["weight"].values
    bucket = loaded.bucket(["weight"], [NUMEL])
    assert piece.data_ptr() in recorded
    bucket.hold(["weight"])
    held = bucket.held["weight"]
    bucket.hold([])
    assert held.data_ptr() in recorded
    loaded.keep_buckets_of({})
    assert bucket.residual.data_ptr() in recorded
    assert torch.equal(loaded.unbucketed["weight"].values, torch.full((NUMEL,), 3.0))
    added = loaded.begin_flush("weight")
    assert added is not None
    bucket = loaded.bucket(["weight"], [NUMEL])
    loaded.end_flush(sent=())
    assert added.data_ptr() in recorded and bucket.residual.mean() == 3.0
    loaded.load_state_dict({**saved(CPU), "velocities": {"weight": torch.ones(NUMEL)}})
    loaded_velocity = loaded.velocities["weight"].values
    assert loaded.bucket(["weight"], [NUMEL]).sent_velocity().mean() == 1.0 and loaded_velocity.data_ptr() in recorded


def overwritten(build: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """What ``build`` returns on a stream that lags behind, while this stream takes all memory of that size."""
    torch.cuda.synchronize()
    behind = torch.cuda.Stream(device)
    with torch.cuda.stream(behind):
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        found = build()
    garbage = [torch.full((NUMEL,), -1.0, device=device) for _ in range(64)]
    torch.cuda.synchronize()
    assert len(garbage) == 64
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_loaded_residual_is_not_overwritten_before_it_is_read() -> None:
    device = torch.device("cuda")
    for _ in range(3):
        loaded = BucketStates(0, 2, device)
        loaded.load_state_dict(saved(device))
        found = overwritten(lambda loaded=loaded: loaded.bucket(["weight"], [NUMEL]).residual, device)  # type: ignore[misc]
        assert torch.equal(found, torch.full_like(found, 3.0))
