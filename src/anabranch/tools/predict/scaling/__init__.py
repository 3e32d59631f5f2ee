"""Predictions over world sizes and networks: the library behind ``anabranch scale``. Needs no torch.

>>> from anabranch.values.files import load_bundled_trace
>>> from anabranch.tools.predict.scaling import scale
>>> found = scale(load_bundled_trace("resnet50"), ["10gbe"], world_sizes=[4, 64], planners=["by_bytes", "optimal"])
>>> for point in found.points:
...     print(f"{point.world_size:3} {point.planner:12} {point.efficiency:.0%}")
  4 by_bytes     20%
  4 optimal      20%
  4 int8         65%
  4 oktopk:0.01  98%
 64 by_bytes     12%
 64 optimal      14%
 64 int8         38%
 64 oktopk:0.01  70%
>>> print(found.answer[0].partition(" (")[0])
10gbe: Dense scheduling helps at 64 ranks, most at 64: optimal is 1.16×
"""

from anabranch.tools.predict.scaling.prediction import scale, strategy_kinds
from anabranch.tools.predict.scaling.result import Scaling, Strategy

__all__ = ["Scaling", "Strategy", "scale", "strategy_kinds"]
