"""Options that several commands share, and the options that are retired."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Literal

from typer import Option

from anabranch.tools.cli.network_text import EXAMPLES
from anabranch.tools.lab.cluster import Backend

Precision = Literal["fp32", "bf16"]  # what a model computes in; its parameters keep their type in both
TraceOption = Annotated[str, Option("--trace", metavar="T", help="A trace file, or a name that anabranch list shows.")]
NetworkOption = Annotated[
    str,
    Option(
        "--network",
        metavar="N",
        help=f"A network file, a description: {EXAMPLES['ring']}, or a name that anabranch list shows: 10gbe:ranks=16.",
    ),
]
BackendOption = Annotated[Backend | None, Option(help="Default: nccl with a GPU.")]
JsonOption = Annotated[
    bool, Option("--json", help="Print one JSON document instead of tables; names end in their unit (_s: seconds).")
]
ForceOption = Annotated[bool, Option("--force", help="Overwrite output files that are already there.")]

PAGE = "anabranch report draws what --json prints: anabranch {} ... --json > run.json, then anabranch report run.json"
HOROVOD = "in Python: anabranch.plan(trace, network, 'by_bytes', cap_nbytes=128 << 20, closes='before')"
SLOWEST = "all ranks wait for the slowest one: give a trace of that rank by --trace"
# By verb, what to use instead of an option, or of one of its values, that is gone.
RETIRED: Mapping[str, Mapping[str, str]] = {
    "bench": {
        "--batch-size": "give the batch with the model, as in --model resnet50:32",
        "--bucket-sizes": "DDP runs with buckets of 1, 5, 10, 50 and 100 MiB; choose some by --only 'DDP, 10 MiB'",
        "--channels-last": "bench races models in torch's own memory format",
        "--hold-after": "--search-steps ends a search, too: give the steps after those that record backward",
        "--lanes": "plans with 2 and 4 lanes run; choose one by --only 'lanes (2)'",
        "--own-caches": "give a run with few contestants (--only) an empty folder as TORCHINDUCTOR_CACHE_DIR",
        "--plot": PAGE.format("bench"),
        "--skip": "leave the --compress of that contestant out, or --compile",
        "--title": "write your own first line into the file of --report",
    },
    "list": dict.fromkeys(("networks", "traces"), "anabranch list shows both, and --json has them apart"),
    "memory": {
        "--activations offload": "Lean keeps activations or recomputes them: --activations keep, or recompute",
        "--clip-norm": "in Python: anabranch.planning.footprint.Setting(clips=True)",
        "--density": "give the density with the exchange, as in --compress oktopk:0.02",
        "--plan": "buckets have 25 MiB; of others, in Python: anabranch.planning.footprint.Setting(buckets=...)",
        "--precision pure-bf16": "give a model whose weights are bfloat16, as in --model train:build",
        "--measure": "train so and read torch.cuda.max_memory_allocated(); for models by name: benchmarks/memory.py",
        "--rate": f"describe the links, as in --network {EXAMPLES['ring']}",
        "--trace": "anabranch scale --within predicts throughput at the largest batches, from its --trace",
        "--ranks-per-node": "give a network with nodes, as in --network nvlink+25gbe",
    },
    "plan": {
        "--cap-mb": "in Python: anabranch.plan(trace, network, 'by_bytes', cap_nbytes=10 << 20), then anabranch.save",
        "--lanes": "in Python: anabranch.plan(trace, network, 'asc', lanes=3), then anabranch.save",
        "--planner horovod": HOROVOD,
    },
    "scale": {
        "--fixed-share": "record a trace at the other batch, and give it by --trace",
        "--planners horovod": HOROVOD,
        "--plot": PAGE.format("scale"),
        "--spread": "describe the links at their best and at their worst: --network may be repeated",
        **dict.fromkeys(("--jitter", "--seed", "--straggler-factor", "--stragglers"), SLOWEST),
    },
    "simulate": {"--planner horovod": HOROVOD},
}


# By verb, what it takes once: who gives two of them expects both to count. Of other options the last one counts.
ONCE: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("compare", "plan", "simulate"), ("--network", "--trace")),
    "memory": ("--network",),
    "scale": ("--trace",),
}


def check_options(argv: Sequence[str]) -> None:
    """ValueError that says what to use instead of a retired option, or value of one; or for one that is given twice."""
    verb = argv[0] if argv else ""
    retired = RETIRED.get(verb, {})
    for word, following in pairwise([*argv[1:], ""]):
        name, equals, value = word.partition("=")
        for given in (name, f"{name} {value if equals else following}"):
            if given in retired:
                raise ValueError(f"{given} of anabranch {verb} is retired: {retired[given]}")
    for option in ONCE.get(verb, ()):
        times = sum(word.partition("=")[0] == option for word in argv)
        if times > 1 and not {"-h", "--help"} & set(argv):
            raise ValueError(f"{option} is given {times} times: expected once; run anabranch {verb} once for each")
