"""What --compress means: a way for DataParallel to send less, or a rival to compare it with."""

from typing import NamedTuple

from anabranch.runtime.dense import COLLECTIVES
from anabranch.sparse.kinds import KIND, given_density
from anabranch.sparse.options import OkTopk
from anabranch.sparse.rivals import RIVALS

WIRES = [kind for kind in COLLECTIVES if kind != "dense"]
OTHERS = [name for name in RIVALS if name != "dense"]
ALLOWED = f"{', '.join(WIRES)}, {KIND}, {KIND}:0.01, or a rival: {', '.join(f'{name}:0.01' for name in OTHERS)}"


class Rival(NamedTuple):
    """An exchange of ``sparse.rivals`` by name, and the share of the elements that it selects."""

    name: str
    density: float


def compression(text: str) -> str | OkTopk | Rival:
    """What "bf16", "oktopk" (as dense as is hidden), "oktopk:0.01" or "gtopk:0.01" means; ValueError if nothing."""
    name = text.partition(":")[0]
    if text in WIRES:
        return text
    if name not in (KIND, *OTHERS):
        raise ValueError(f"--compress is {text!r}: expected {ALLOWED}")
    if text == KIND:
        return OkTopk(warmup_steps=0)  # nothing is trained here
    density = given_density(text)
    return OkTopk(density=density, warmup_steps=0) if name == KIND else Rival(name, density)
