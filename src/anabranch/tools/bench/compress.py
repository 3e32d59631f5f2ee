"""The values of --compress: compressions of DataParallel, and published exchanges to compare with (rivals)."""

from dataclasses import replace
from typing import NamedTuple

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


class Rival(NamedTuple):
    """An exchange of ``bench.baselines`` by name, and the share of the elements that it selects."""

    name: str
    density: float


def compression(text: str) -> str | OkTopk | Auto | Rival:
    """What "int8", "auto" (as faithful as is hidden), "auto:int8" (at least int8), "auto:oktopk:0.01" (the whole
    ladder), "oktopk", "oktopk:0.01", "oktopk:0.01:bf16" or "gtopk:0.01" means.
    """
    ours = of_ours(text, OkTopk(warmup_steps=0))  # nothing is trained here
    if ours is not None:
        return ours
    name = text.partition(":")[0]
    if name not in OTHERS:
        raise ValueError(f"--compress is {text!r}: expected {ALLOWED}")
    return Rival(name, given_density(text))


def of_ours(text: str, oktopk: OkTopk) -> str | OkTopk | Auto | None:
    """The same without rivals, of which it returns None; ``oktopk`` has the settings that the text does not name."""
    if text in COMPRESSED:
        return text
    name, _, rest = text.partition(":")
    if name == "auto":
        return Auto(at_least=rest or None, oktopk=oktopk)
    if name != OKTOPK:
        return None
    plain, wire = split_wire(text, oktopk.wire)
    return replace(oktopk, wire=wire, density=oktopk.density if plain == OKTOPK else given_density(text, wires=True))
