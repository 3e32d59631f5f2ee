"""DDP's default against DataParallel's, nobody tuning anything, on whatever cluster launches this; prints Markdown.

torchrun ... benchmarks/against_ddp.py resnet50 densenet201 ...     (needs CUDA; see zoo.MODELS)
"""

import sys
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles
from time import perf_counter

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import anabranch as ab
from anabranch.runtime.zoo import build

IMAGES_PER_RANK = 32
STEPS = 12


def main() -> None:
    """Each model by itself, then under DDP, DataParallel, and DDP again."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    say(
        "| model | compute | DDP before | DataParallel | DDP after | ratio | predicted | in force |\n"
        + "|---" * 8
        + "|"
    )
    for name in sys.argv[1:]:
        torch.manual_seed(0)
        model, step = build(name, device, batch=None if "bert" in name or "gpt" in name else IMAGES_PER_RANK)
        compute = timed(step)
        before = timed(partial(step, DistributedDataParallel(model, gradient_as_bucket_view=True)))
        parallel = ab.DataParallel(model, gradient_as_bucket_view=True)
        while "running" not in parallel.explain().partition("\n")[0]:
            step(parallel)
        ours = timed(partial(step, parallel))
        explained = parallel.explain()
        parallel.close()
        after = timed(partial(step, DistributedDataParallel(model, gradient_as_bucket_view=True)))
        ratio = median(ours) / min(median(before), median(after))
        chosen = next(line for line in explained.splitlines() if line.startswith("* "))
        layout, predicted = chosen.split("ms")[0].rsplit(None, 1)
        times = " | ".join(ms(seconds) for seconds in (compute, before, ours, after))
        say(f"| {name} | {times} | {ratio:.3f} | {predicted} | {layout[2:].strip()} |")
        if dist.get_rank() == 0:
            print(explained, file=sys.stderr)
        del model, step
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def timed(step: Callable[[], None]) -> list[float]:
    """Seconds of each of some steps, all ranks starting together, after four that are not counted."""
    seconds = []
    for count in range(STEPS + 4):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start = perf_counter()
        step()
        torch.cuda.synchronize()
        if count >= 4:
            seconds.append(perf_counter() - start)
    return seconds


def ms(seconds: list[float]) -> str:
    """Median and quartiles in milliseconds."""
    low, middle, high = quantiles(seconds, n=4)
    return f"{middle * 1e3:.1f} [{low * 1e3:.1f}, {high * 1e3:.1f}]"


def say(text: str) -> None:
    """Rank 0 speaks."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
