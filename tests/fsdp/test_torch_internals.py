"""The private names of FSDP2: where torch has one of them elsewhere, replicate() and watch() say so by its name."""

import anabranch as ab
from anabranch.fsdp import torch_internals as internals
from fsdp.small_model import model_of, refused, two_nodes, without
from ranks import on_ranks

PARTS = (*internals.STATE_PARTS, *internals.GROUP_PARTS, *internals.PARAMETER_PARTS)


def without_a_part(rank: int) -> list[list[str]]:
    """What both say without each of the parts."""
    mesh = two_nodes()
    said = []
    for part in PARTS:
        model = model_of(mesh["shard"])
        with without(model, part):
            said.append([refused(lambda: ab.replicate(model, mesh)), refused(lambda: ab.watch(model))])  # noqa: B023
    return said


def test_another_torch_is_refused_by_name() -> None:
    for found in on_ranks(without_a_part, 2):
        for part, said in zip(PARTS, found, strict=True):
            for text in said:
                assert "anabranch does not fit torch" in text and f" has no {part}; it is tested with" in text
