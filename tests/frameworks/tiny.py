"""A tiny GPT-2 on random tokens, and ranks that frameworks take for torchrun's."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import anabranch as ab

VOCABULARY = 64
LENGTH = 16
DENSITY = 0.05


def as_under_torchrun(rank: int) -> None:
    """Set what torchrun sets, for a framework on this rank; its warnings are not ours to judge."""
    warnings.simplefilter("ignore")
    ranks = str(dist.get_world_size())
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip


def gpt2() -> Any:
    """The same model on every rank, with dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def rows(count: int = 64) -> list[dict[str, torch.Tensor]]:
    """Examples of random tokens."""
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def options_of(kind: str) -> dict[str, Any]:
    """Arguments of DataParallel under which two runs are equal bit by bit."""
    if kind == "dense":
        return {}
    parameters = list(reversed(list(gpt2().named_parameters())))
    large, small = [tuple(name for name, p in parameters if (p.dim() > 1) == big) for big in (True, False)]
    plan = ab.Plan((ab.Bucket(large, collective=f"oktopk:{DENSITY}"), ab.Bucket(small)))
    return {"compress": ab.OkTopk(density=DENSITY, deterministic=True), "plan": plan}


def files_of_ranks(folder: Path) -> list[str]:
    """The names of the files with residuals in a checkpoint."""
    return sorted(path.name for path in folder.glob("anabranch*"))
