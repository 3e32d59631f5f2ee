"""Flat buckets: a parameter's part of a bucket as a view with the parameter's shape."""

import torch


def shaped(piece: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return ``piece``, one parameter's part of a flat bucket, as a view of the parameter's shape.

    Elements are in the order of the parameter's own memory, as in DDP's buckets: a channels-last parameter gets
    channels-last strides. A parameter that is not dense in memory (an expanded one, say) gets contiguous strides.
    """
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return piece.as_strided(parameter.shape, parameter.stride())
    return piece.view(parameter.shape)
