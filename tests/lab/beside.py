"""An emulated group beside the real one of the same ranks."""

import os

import torch.distributed as dist
from torch.distributed import distributed_c10d

from anabranch.comm.lanes import same_ranks
from anabranch.lab.emulation import Settings
from anabranch.lab.emulation.install import install
from anabranch.lab.emulation.settings import VARIABLE

Group = dist.ProcessGroup


def real() -> Group:
    """The one that the ranks were started with."""
    group = dist.group.WORLD
    assert group is not None
    return group


def emulated(settings: Settings) -> Group:
    """A group beside the real one; what this process makes from now on is emulated too."""
    os.environ[VARIABLE] = str(settings)
    install(distributed_c10d, settings)
    return same_ranks(real(), "gloo", "emulated")
