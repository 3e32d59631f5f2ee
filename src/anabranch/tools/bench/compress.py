"""The compressions of DataParallel by the values of --compress, in ``anabranch bench`` and ``anabranch run``."""

from dataclasses import replace

<<<<<<< HEAD
from anabranch.values.kinds.auto import Auto
from anabranch.values.kinds.names import AUTO, COMPRESSED
from anabranch.values.kinds.oktopk import OkTopk
from anabranch.values.kinds.sparse_names import KIND, given_density, split_wire

EXAMPLES = (*COMPRESSED, AUTO, f"{AUTO}:int8", f"{AUTO}:{KIND}:0.01", KIND, f"{KIND}:0.01", f"{KIND}:0.01:bf16")
RIVALS = "published rivals race by python -m benchmarks.rivals, in a checkout"
UNTRAINED = OkTopk(warmup_steps=0)  # in a benchmark, where nothing is learnt
=======
from anabranch.tools.bench.baselines import BASELINES
from anabranch.values.kinds.names import COMPRESSED, OKTOPK, given_density, split_wire
from anabranch.values.kinds.options import Auto, OkTopk

OTHERS = [name for name in BASELINES if name != "dense"]
OURS = [
    *COMPRESSED,
    "auto",
    "auto:int8",
    f"auto:{OKTOPK}:0.01",
    OKTOPK,
    f"{OKTOPK}:bf16",
    *(f"{OKTOPK}:0.01{w}" for w in ("", ":bf16", ":int8")),
]
ALLOWED = f"{', '.join(OURS)}, or a rival: {', '.join(f'{name}:0.01' for name in OTHERS)}"
>>>>>>> main


def compression(text: str, oktopk: OkTopk = UNTRAINED) -> str | OkTopk | Auto:
    """What "int8", "auto" (as faithful as is hidden), "auto:int8" (at least int8), "auto:oktopk:0.01" (the whole
    ladder), "oktopk", "oktopk:0.01" or "oktopk:0.01:bf16" means; ``oktopk`` has the settings that the text does not
    name.
    """
    if text in COMPRESSED:
        return text
    name, _, rest = text.partition(":")
    if name == AUTO:
        return Auto(at_least=rest or None, oktopk=oktopk)
<<<<<<< HEAD
    if name != KIND:
        raise ValueError(f"--compress is {text!r}: expected {', '.join(EXAMPLES)}; {RIVALS}")
=======
    if name != OKTOPK:
        return None
>>>>>>> main
    plain, wire = split_wire(text, oktopk.wire)
    return replace(oktopk, wire=wire, density=oktopk.density if plain == OKTOPK else given_density(text, wires=True))
