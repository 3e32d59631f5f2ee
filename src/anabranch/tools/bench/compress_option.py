"""The compressions of DataParallel by the values of --compress, in ``anabranch bench`` and ``anabranch run``."""

from dataclasses import replace

from anabranch.values.kinds.names import AUTO, COMPRESSED, OKTOPK, given_density, split_wire
from anabranch.values.kinds.options import Auto, OkTopk

EXAMPLES = (*COMPRESSED, AUTO, "auto:int8", "auto:oktopk:0.01", OKTOPK, "oktopk:0.01", "oktopk:0.01:bf16")
RIVALS = "published rivals race by python -m benchmarks.rivals, in a checkout"
UNTRAINED = OkTopk(warmup_steps=0)  # in a benchmark, where nothing is learnt


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
    if name != OKTOPK:
        raise ValueError(f"--compress is {text!r}: expected {', '.join(EXAMPLES)}; {RIVALS}")
    plain, wire = split_wire(text, oktopk.wire)
    return replace(oktopk, wire=wire, density=oktopk.density if plain == OKTOPK else given_density(text))
