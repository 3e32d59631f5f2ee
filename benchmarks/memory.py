"""Predicted against measured peak memory on this GPU, every way to train: prints a Markdown report.

python -m benchmarks.memory [--optimizer momentum] [--ranks 4] [model:batch ...]

Without torchrun one rank runs DDP and naive sparse; under torchrun or in a lab all modes run.
"""

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime

import torch
import torch.distributed as dist
from benchmarks.peak_memory import peak, runnable_modes, world

from anabranch.planning.footprint import KINDS, Setting
from anabranch.tools.bench.zoo import build_at
from anabranch.tools.predict.memory.estimator import OPTIMIZERS
from anabranch.tools.predict.memory.probe import probe
from anabranch.tools.predict.memory.training_modes import predict

SUBJECTS = ("resnet152:64", "vgg16:64", "bert-large:8", "gpt2:8")
MIB, GIB = 2**20, 2**30


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="momentum")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--modes", nargs="+", help="all that can run here, if not given")
    parser.add_argument("subjects", nargs="*", default=SUBJECTS, metavar="model:batch")
    given = parser.parse_args()
    with world() as ranks:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        setting = Setting(ranks=ranks if ranks > 1 else given.ranks, density=given.density)
        rows = [row for subject in given.subjects for row in measured(subject, given.optimizer, setting, given.modes)]
        if dist.get_rank() == 0:
            name, versions = torch.cuda.get_device_name(), f"torch {torch.__version__}"
            print(f"# Peak memory, predicted and measured\n\n{datetime.now(UTC).date()}, {name}, {versions}.")
            print(f"{setting.ranks} ranks, density {setting.density:g}, {given.optimizer}; GiB, its parts in MiB.\n")
            print(
                "| model:batch | mode | predicted | measured | off by | first steps | "
                + " | ".join(KINDS)
                + " | fullest |"
            )
            print("|---|---|" + "---:|" * (4 + len(KINDS)) + "---|")
            print("\n".join(rows))


def measured(subject: str, optimizer: str, setting: Setting, modes: Sequence[str] | None) -> list[str]:
    """The lines of one model."""
    name, _, batch = subject.partition(":")
    factory, build = OPTIMIZERS[optimizer], build_at(name, int(batch))
    profile = probe(build, factory)
    lines = []
    for mode in modes or runnable_modes():
        found = predict(profile, mode, setting)
        seen = peak(build, mode, factory, setting.ranks, setting.density)
        parts = " | ".join(f"{found.kinds[kind] / MIB:.0f}" for kind in KINDS)
        off = found.nbytes / seen.steady - 1
        sizes = " | ".join(f"{nbytes / GIB:.2f}" for nbytes in (found.nbytes, seen.steady))
        lines.append(f"| {subject} | {mode} | {sizes} | {off:+.1%} | {seen.first / GIB:.2f} | {parts} | {found.at} |")
    return lines


if __name__ == "__main__":
    main()
