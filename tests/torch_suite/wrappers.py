"""What stands for DistributedDataParallel in torch's tests: DDP itself, or a DataParallel."""

import sys
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from anabranch import DataParallel, Network
from parallel.twins import SCENARIOS, scattered
from torch_suite.suite import DEFAULT, EAGER, STOCK

# These modules keep the class: torch's own defines it, the library builds on it, our tests compare with it.
KEEP = ("torch.nn.parallel.distributed", "anabranch", "parallel.", "torch_suite")


class EagerDataParallel(DataParallel):
    """Keeps a plan with odd buckets after a few steps, whatever its step time, since torch's tests are short."""

    def __init__(self, module: Any, *args: Any, **options: Any) -> None:
        ours = {
            "planner": scattered,
            "profile_steps": 2,
            "policy": replace(SCENARIOS["keeps the plan"], settle_steps=1),
        }
        group = options.get("process_group") or dist.group.WORLD
        if isinstance(group, dist.ProcessGroup):
            ours["network"] = Network.ring(dist.get_world_size(group), 1e-5, 1e-9)
        super().__init__(module, *args, **{**ours, **options})


def put_in_place_of_ddp(mode: str) -> None:
    """In every module that has imported DistributedDataParallel, its name means this wrapper from now on."""
    wrapper: type = {STOCK: DistributedDataParallel, DEFAULT: DataParallel, EAGER: EagerDataParallel}[mode]
    for name, module in list(sys.modules.items()):
        if name.startswith(KEEP):
            continue
        for attribute, value in list(vars(module).items()):
            if value is DistributedDataParallel:
                setattr(module, attribute, wrapper)
