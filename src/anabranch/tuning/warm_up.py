"""What may be exchanged while training warms up: exchanges with residuals wait until it has."""

from collections.abc import Mapping, Sequence

from torch import nn

from anabranch.exchange.collectives import Collectives
from anabranch.values.plan import Plan

WARM_UP_KIND = "bf16"  # may be used while an exchange with residuals still waits for its warm-up: it delays nothing


def warm_up_kinds(kinds: Sequence[str], collectives: Collectives, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Kinds that delay nothing, so that plans may use them while those with residuals wait: of ``kinds`` if it can."""
    asked = [kind for kind in kinds if not collectives.residuals.keeps(kind)]
    dtypes = {parameter.dtype for parameter in parameters.values()}
    may_round = all(collectives.supports(WARM_UP_KIND, dtype) for dtype in dtypes)
    return asked or ([WARM_UP_KIND] if may_round else [])


def may_run(plan: Plan | None, steps_done: int, collectives: Collectives) -> bool:
    """Whether a plan may run after so many steps."""
    if plan is None or steps_done >= collectives.residuals.warmup_steps:
        return True
    return not any(collectives.residuals.keeps(bucket.collective) for bucket in plan.buckets)
