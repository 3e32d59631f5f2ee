"""What exchanges share: gathering equal parts, and works that exist."""

import pytest
import torch
import torch.distributed as dist

from anabranch.exchange.interface import all_gather, issued, record_stream
from ranks import on_ranks


def gathered(rank: int) -> list[float]:
    assert dist.group.WORLD is not None
    output = torch.empty(2 * dist.get_world_size())
    issued(all_gather(output, torch.full((2,), float(rank)), dist.group.WORLD)).wait()
    record_stream(output)  # nothing to do on a CPU
    return output.tolist()


def test_parts_are_gathered_in_rank_order() -> None:
    assert on_ranks(gathered, 3) == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]] * 3


def test_a_rank_outside_the_group_is_told_what_it_could_not_send() -> None:
    with pytest.raises(RuntimeError, match="not a member of the process group on which it was to send the regions"):
        issued(None, "the regions")
