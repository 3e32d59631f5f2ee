"""Which parts of a model are its blocks."""

from torch import nn

from anabranch.lean.activations.blocks import blocks_of
from lean.activations.networks import Attention, Net, Vgg


def names(model: nn.Module) -> list[str]:
    return [block.name for block in blocks_of(model)]


def test_blocks_are_what_repeats() -> None:
    assert names(Net()) == ["stage1.0", "stage1.1", "stage1.2", "stage2.0", "stage2.1"]
    assert [block.joins for block in blocks_of(Net())] == [False, True, True, False, True]
    assert names(Attention()) == ["layers.0", "layers.1", "layers.2"]
    assert not any(block.joins for block in blocks_of(Attention()))


def test_layers_in_place_and_without_a_matrix_belong_to_the_one_before() -> None:
    blocks = {block.name: block.children for block in blocks_of(Vgg())}
    assert blocks == {
        "features.0": ("0", "1", "2"),
        "features.3": ("3", "4", "5"),
        "features.6": ("6", "7", "8"),
        "features.9": ("9", "10", "11", "12"),
        "classifier.0": ("0",),
        "classifier.1": ("1", "2", "3"),
        "classifier.4": ("4",),
    }


def test_stages_of_blocks_are_looked_into_and_blocks_of_layers_are_not() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU())

    assert names(nn.Sequential(nn.Sequential(block(), block()), block())) == ["0.0", "0.1", "1"]
    assert names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == ["0", "2"]
    assert names(nn.Linear(4, 4)) == []


def test_a_model_without_containers_is_taken_by_its_parts() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = Part(), Part(), nn.Linear(4, 4)
            self.again = self.second

    assert names(Whole()) == ["first", "second"]
