"""Records the traces that ship with the package; run on a machine with an NVIDIA GPU, torchvision and transformers.

python benchmarks/record_traces.py OUTPUT_FOLDER [model[-bf16] ...]
"""

import sys
from functools import partial
from pathlib import Path

import torch

from anabranch.observe.recorder import record
from anabranch.tools.bench.zoo import MODELS, model_and_step, trace_meta
from anabranch.values.files import save

BF16 = ("resnet50-bf16", "bert-base-bf16", "gpt2-bf16", "bert-large-bf16")


def main() -> None:
    """Record each model and print its forward and backward time."""
    folder, *names = sys.argv[1:]
    device = torch.device("cuda", 0)
    for full_name in names or (*MODELS, *BF16):
        torch.manual_seed(0)
        name = full_name.removesuffix("-bf16")
        half = full_name.endswith("-bf16")
        model, step = model_and_step(name, device, torch.bfloat16 if half else None)
        trace = record(model, partial(step, model), steps=30, warmup=10, meta=trace_meta(name, half))
        save(trace, Path(folder) / f"{full_name}.json", force=True)
        print(
            f"{full_name}: {len(trace)} tensors, {trace.nbytes / 1e6:.1f} MB, "
            f"forward {trace.forward_s * 1e3:.2f} ms, backward {trace.backward_s * 1e3:.2f} ms",
            flush=True,
        )
        del model, step
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
