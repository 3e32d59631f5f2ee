"""An emulated group beside the real one of the same ranks."""

import os

import torch.distributed as dist
from torch.distributed import distributed_c10d

from anabranch.exchange.groups import timeout_of
from anabranch.tools.lab.emulation.install import install
from anabranch.tools.lab.emulation.settings import NETWORK_VARIABLE, NOTE_VARIABLE, EmulatedNetwork

Group = dist.ProcessGroup


def real() -> Group:
    """The one that the ranks were started with."""
    group = dist.group.WORLD
    assert group is not None
    return group


def emulated(network: EmulatedNetwork, name: str = "emulated") -> Group:
    """A group beside the real one; from the first call on, every group that this process makes is emulated so."""
    if NETWORK_VARIABLE not in os.environ:
        os.environ[NETWORK_VARIABLE] = str(network)
        os.environ[NOTE_VARIABLE] = network.note
        install(distributed_c10d, network)
    assert os.environ[NETWORK_VARIABLE] == str(network)
    group = dist.new_group(timeout=timeout_of(real()), group_desc=name)
    assert isinstance(group, dist.ProcessGroup)
    return group
