"""The ways to train that ``anabranch demo`` compares, as a user would write them."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anabranch.exchange.compression import Compress
from anabranch.parallel import DataParallel
from anabranch.tools.report.documents import BASELINE, OURS
from anabranch.values.kinds.options import OkTopk

WARMUP_STEPS = 5  # of Ok-Topk, whose default of 100 is more than the whole demo


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train: its name, the line of code for it, and the same as a function of the model.

    ``compressed``: whether it may send less than all values.
    """

    name: str
    code: str
    wrap: Callable[[nn.Module], DistributedDataParallel]
    compressed: bool = False


def _ours(name: str, compress: Compress = None, written: str = "") -> Way:
    """A DataParallel without a cache, because the demo shows what is found on this machine today."""
    code = f"ab.DataParallel(model, compress={written})" if written else "ab.DataParallel(model)"
    return Way(name, code, lambda model: DataParallel(model, compress=compress, cache=False), bool(written))


DDP = Way(BASELINE, "DistributedDataParallel(model)", DistributedDataParallel)
DENSE = _ours(OURS)
INT8 = _ours("int8", "int8", '"int8"')
OKTOPK_10, OKTOPK_1 = (
    _ours(
        f"Ok-Topk {density:.0%}".replace("%", " %"),
        OkTopk(density=density, warmup_steps=WARMUP_STEPS),
        f"ab.OkTopk(density={density}, warmup_steps={WARMUP_STEPS})",
    )
    for density in (0.1, 0.01)
)
AUTO = _ours("auto", "auto", '"auto"')

ON_SLOW_LINKS = (DDP, DENSE, INT8, OKTOPK_10, OKTOPK_1, AUTO)
ON_FAST_LINKS = (DDP, INT8, OKTOPK_1, AUTO)
