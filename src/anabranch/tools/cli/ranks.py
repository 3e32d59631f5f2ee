"""The process group of commands that run on ranks, with the backend and device of this rank."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def join(backend: str | None, on_gpu: bool = True) -> "torch.device":
    """Join the default process group and return the device of this rank.

    The backend is the one asked for, else the lab's, else NCCL where there is a GPU. With ``on_gpu`` false the command
    uses no GPU, and the backend is Gloo.
    """
    import torch
    import torch.distributed as dist

    from anabranch.tools.lab.rank_environment import LAB_BACKEND

    of_lab = os.environ.get(LAB_BACKEND)
    if backend is not None and of_lab not in (None, backend):
        raise ValueError(f"--backend is {backend}, but the lab was made for {of_lab}: say --backend {backend} there")
    backend = backend or of_lab
    gpu = on_gpu and torch.cuda.is_available() and backend != "gloo"
    if backend == "nccl" and not gpu:
        why = "torch sees no GPU here" if on_gpu else "a replayed trace computes nothing on a GPU"
        raise ValueError(f"--backend is nccl, but {why}: choose gloo")
    if not gpu:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device
