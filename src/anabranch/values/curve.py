"""Curve: what a message costs by its size, through measured points or along a straight line."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import linear_regression
from typing import NamedTuple, Self

from anabranch.values.checks import MAX_SECONDS, check_nbytes, check_seconds

Points = Iterable[tuple[int, float] | tuple[int, float, float]]


class Segment(NamedTuple):
    """From ``nbytes`` up to the next segment a message costs seconds + s_per_byte · (its bytes − nbytes)."""

    nbytes: int
    seconds: float
    s_per_byte: float


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A message of ``nbytes`` took ``seconds`` (median), give or take ``spread_s`` (interquartile range)."""

    nbytes: int
    seconds: float
    spread_s: float = 0.0

    def __post_init__(self) -> None:
        check_nbytes("a point of a curve", self.nbytes)
        check_seconds(f"cost of {self.nbytes} bytes", self.seconds)
        check_seconds(f"spread at {self.nbytes} bytes", self.spread_s)


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes to seconds: flat below the first point, straight lines between points, the tail slope beyond.

    Never falls: a longer message never costs less, which planners rely on.
    """

    points: tuple[CurvePoint, ...]
    tail_s_per_byte: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple(self.points))
        check_seconds("tail_s_per_byte", self.tail_s_per_byte)
        if not self.points:
            raise ValueError("a curve has no points: expected at least one")
        for low, high in pairwise(self.points):
            if high.nbytes <= low.nbytes:
                raise ValueError(f"a curve goes from {low.nbytes} to {high.nbytes} bytes: expected rising sizes")
            if high.seconds < low.seconds:
                raise ValueError(
                    f"a curve falls from {low.seconds} s at {low.nbytes} bytes to {high.seconds} s at "
                    f"{high.nbytes}: build it with Curve.through(points), which smooths noise"
                )

    @classmethod
    def linear(cls, start_s: float, s_per_byte: float) -> Self:
        """T(M) = start_s + s_per_byte · M."""
        return cls((CurvePoint(0, start_s),), s_per_byte)

    @classmethod
    def through(cls, points: Points) -> Self:
        """A curve through measured (nbytes, seconds[, spread_s]) points, made non-falling.

        Where noise makes a longer message look less expensive, neighbours are averaged until it does not (isotonic
        regression by pooling adjacent violators). The tail continues the line through the last two points.
        """
        measured = sorted((CurvePoint(*point) for point in points), key=lambda point: point.nbytes)
        if len(measured) < 2:
            raise ValueError(f"a measured curve has {len(measured)} points: expected at least two")
        if twice := [low.nbytes for low, high in pairwise(measured) if low.nbytes == high.nbytes]:
            raise ValueError(f"{twice[0]} bytes were measured twice: give one point per size")
        smooth = _never_falling(measured)
        rise_s = smooth[-1].seconds - smooth[-2].seconds
        return cls(smooth, rise_s / (smooth[-1].nbytes - smooth[-2].nbytes))

    @property
    def start_s(self) -> float:
        """What the smallest message costs: the part of every message that moves no bytes."""
        return self.points[0].seconds

    def seconds(self, nbytes: int) -> float:
        """Cost of one message of ``nbytes``."""
        check_nbytes("a message", nbytes)
        at = bisect_right(self.points, nbytes, key=lambda point: point.nbytes) - 1
        if at < 0:
            return self.start_s
        return self.points[at].seconds + self._slope(at) * (nbytes - self.points[at].nbytes)

    def segments(self) -> list[Segment]:
        """The straight lines of the curve, from zero bytes on; the last one has no end."""
        lines = [] if self.points[0].nbytes == 0 else [Segment(0, self.start_s, 0.0)]
        return lines + [Segment(low.nbytes, low.seconds, self._slope(at)) for at, low in enumerate(self.points)]

    def _slope(self, at: int) -> float:
        """Seconds per byte from this point on."""
        if at + 1 == len(self.points):
            return self.tail_s_per_byte
        low, high = self.points[at], self.points[at + 1]
        return (high.seconds - low.seconds) / (high.nbytes - low.nbytes)

    def line(self) -> tuple[float, float]:
        """(start_s, s_per_byte) of the straight line nearest to the points, by least squares; neither negative.

        The published planners know only such a line. A curve of one point is its own line.
        """
        if len(self.points) == 1:
            only = self.points[0]
            return max(0.0, only.seconds - self.tail_s_per_byte * only.nbytes), self.tail_s_per_byte
        fitted = linear_regression([p.nbytes for p in self.points], [p.seconds for p in self.points])
        return max(0.0, fitted.intercept), max(0.0, fitted.slope)  # flat, but for rounding

    def least_s_per_byte(self, nbytes: int) -> float:
        """The fewest seconds per byte, start-up included, at which any message of up to ``nbytes`` travels."""
        return min(self.seconds(size) / size for size in self._corners(nbytes))

    def least_transfer_s_per_byte(self, nbytes: int) -> float:
        """The fewest seconds per byte, without the start-up, at which any message of up to ``nbytes`` travels."""
        return min((self.seconds(size) - self.start_s) / size for size in self._corners(nbytes))

    def _corners(self, nbytes: int) -> list[int]:
        """Where a ratio of cost to size can be least: at the points of the curve, or at the largest size."""
        return [p.nbytes for p in self.points if 0 < p.nbytes < nbytes] + [max(nbytes, 1)]

    def shifted(self, spreads: float) -> Self:
        """The curve with ``spreads`` times each point's spread added; negative: a curve of lower costs.

        Beyond the last point the slope changes by the same factor as the cost of that point.
        """
        moved = [replace(p, seconds=max(0.0, p.seconds + spreads * p.spread_s)) for p in self.points]
        last, after, tail = self.points[-1].seconds, moved[-1].seconds, self.tail_s_per_byte
        if last and tail:  # the ratio of a point of next to no seconds may be infinite
            tail = min(tail * (after / last), MAX_SECONDS)
        return replace(self, points=_never_falling(moved), tail_s_per_byte=tail)

    def scaled(self, factor: float, extra_s: float = 0.0) -> Self:
        """All costs, and their spreads, that many times as high, and each message ``extra_s`` more."""
        points = tuple(
            replace(p, seconds=p.seconds * factor + extra_s, spread_s=p.spread_s * factor) for p in self.points
        )
        return replace(self, points=points, tail_s_per_byte=self.tail_s_per_byte * factor)


def _never_falling(points: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
    """The nearest points that do not fall: neighbours that do share their mean (pooling adjacent violators)."""
    pools: list[tuple[float, int]] = []  # (mean seconds, how many points share it)
    for point in points:
        mean, count = point.seconds, 1
        while pools and pools[-1][0] > mean:
            other, n = pools.pop()
            mean, count = (mean * count + other * n) / (count + n), count + n
        pools.append((mean, count))
    level = [mean for mean, count in pools for _ in range(count)]
    return tuple(replace(p, seconds=s) for p, s in zip(points, level, strict=True))
