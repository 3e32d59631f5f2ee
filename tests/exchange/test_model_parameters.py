"""Parts of flat buckets have the memory order of their parameters."""

import torch

from anabranch.exchange.model_parameters import shaped


def test_a_part_shares_memory_and_has_the_parameters_strides() -> None:
    flat = torch.arange(24.0)
    for parameter in (torch.zeros(2, 3, 4), torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)):
        view = shaped(flat, parameter)
        assert view.shape == parameter.shape
        assert view.stride() == parameter.stride()
        assert view.data_ptr() == flat.data_ptr()


def test_a_parameter_with_gaps_in_memory_gets_contiguous_strides() -> None:
    gaps = torch.zeros(4, 6)[:, ::2]
    assert shaped(torch.arange(12.0), gaps).stride() == (3, 1)
