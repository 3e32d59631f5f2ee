"""Scalings for the tests of their reports, from iteration times."""

from collections.abc import Mapping, Sequence

from anabranch.tools.predict.scaling.result import NetworkUsed, ScalePoint, Scaling, Strategy

COMPUTE_S = 0.05  # what every step of such a scaling computes


def scaling_of(
    iteration_s: Mapping[str, Mapping[int, float]],
    *,
    sparse: Sequence[str] = (),
    quantised: Sequence[str] = (),
    band: float = 0.1,
    network: str = "net",
    more: Sequence[str] = (),
    model: str = "model",
    note: str = "weak",
) -> Scaling:
    """The same curves on one network or on several; the dearest network makes communication take a share longer."""
    networks = [network, *more]
    sizes = list(next(iter(iteration_s.values())))
    points = [
        _point(name, strategy, size, iteration_s[strategy][size], band)
        for name in networks
        for size in sizes
        for strategy in iteration_s
    ]
    kinds = dict.fromkeys(sparse, "sparse") | dict.fromkeys(quantised, "quantised")
    strategies = [Strategy(name, kinds.get(name, "dense"), 8) for name in iteration_s]  # type: ignore[arg-type]
    used = [NetworkUsed(name, "assumed", "stated", "a ring") for name in networks]
    return Scaling(model, "weak", tuple(used), tuple(strategies), tuple(points), assumptions=(note,))


def _point(network: str, strategy: str, size: int, step_s: float, band: float) -> ScalePoint:
    speedup = size * COMPUTE_S / step_s if step_s else float(size)
    exposed_s = max(0.0, step_s - COMPUTE_S)
    low_s, high_s = step_s - band * exposed_s, step_s + band * exposed_s
    return ScalePoint(
        network, strategy, size, 3, 1, step_s, low_s, high_s, exposed_s, speedup, speedup / size, speedup * 8
    )
