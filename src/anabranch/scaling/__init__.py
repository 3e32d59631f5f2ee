"""Predictions over world sizes and networks: the library behind ``anabranch scale``. Needs no torch.

>>> import anabranch as ab
>>> from anabranch.scaling import scale
>>> tensors = [ab.TensorSpec(f"layer{i}", 2_000_000, 4, 0.002 * (i + 1)) for i in range(20)]
>>> trace = ab.Trace(tuple(tensors), forward_s=0.02, meta={"model": "example"})
>>> found = scale(trace, ["10gbe"], world_sizes=[4, 16], planners=["by_bytes", "optimal"], compress=[])
>>> [(point.world_size, point.planner, f"{point.efficiency:.0%}") for point in found.points]
[(4, 'by_bytes', '27%'), (4, 'optimal', '31%'), (16, 'by_bytes', '17%'), (16, 'optimal', '20%')]
>>> print(found.answer[0].partition(".")[0])
10gbe: Dense scheduling helps at 4 and 16 ranks, most at 16: optimal is 1
"""

from anabranch.scaling.answer import answer
from anabranch.scaling.result import NetworkUsed, ScalePoint, Scaling, Strategy
from anabranch.scaling.study import scale, strategy_kinds
from anabranch.scaling.sweep import Compute, sweep

__all__ = [
    "Compute",
    "NetworkUsed",
    "ScalePoint",
    "Scaling",
    "Strategy",
    "answer",
    "scale",
    "strategy_kinds",
    "sweep",
]
