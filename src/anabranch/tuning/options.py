"""TuningOptions: the arguments of DataParallel that are not DDP's, and what is wrong with them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from anabranch.comm.agree import check_same
from anabranch.comm.collectives import Collectives
from anabranch.ddp.reducer import layout_of
from anabranch.errors import NetworkError, PlanError
from anabranch.network import Network
from anabranch.plan import MAX_LANES, Plan
from anabranch.planners import PLANNERS
from anabranch.trace import Trace

Planner = Callable[[Trace, Network], Plan]


@dataclass(frozen=True, slots=True)
class TuningOptions:
    """The arguments of DataParallel that are not DDP's; ``kinds`` and ``dense_names`` as in ``Collectives``."""

    planner: str | Planner
    plan: Plan | None
    network: Network | None
    lanes: int | None
    profile_steps: int
    kinds: tuple[str, ...] = ()
    dense_names: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Refuse what no rank could mean."""
        for name, kind in (("plan", Plan), ("network", Network)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ValueError(
                    f"{name} is a {type(value).__name__}: expected a {kind.__name__}, such as anabranch.load(path)"
                )
        if isinstance(self.planner, str) and self.planner not in PLANNERS:
            raise ValueError(f"planner is {self.planner!r}: expected one of {', '.join(PLANNERS)}, or a function")
        if not isinstance(self.planner, str) and not callable(self.planner):
            raise ValueError(f"planner is {self.planner!r}: expected a name or a function (trace, network) -> Plan")
        if self.lanes is not None and not 1 <= self.lanes <= MAX_LANES:
            raise ValueError(f"lanes is {self.lanes}: expected 1 to {MAX_LANES}, or None to choose")
        if self.profile_steps < 0:
            raise ValueError(f"profile_steps is {self.profile_steps}: expected 0 or more")

    def described(self) -> list[str]:
        """A line per wish, such that ranks with equal lines wish the same."""
        planner = self.planner
        return [
            f"planner {planner if isinstance(planner, str) else getattr(planner, '__qualname__', 'a function')}",
            f"plan {self.plan.fingerprint if self.plan is not None else None}",
            f"network given {self.network is not None}",
            f"lanes {self.lanes}",
            f"profile_steps {self.profile_steps}",
        ]

    def check_agreed(self, module: nn.Module, group: dist.ProcessGroup | None, *further: str) -> None:
        """Refuse, on all ranks alike, models or wishes that differ among ranks; ``further`` settings as lines, too."""
        if group is None:
            raise RuntimeError("no process group: call torch.distributed.init_process_group() before DataParallel")
        check_same("the model", model_described(module), group)
        check_same("the settings of DataParallel", [*self.described(), *further], group)

    def check_fits(self, parameters: Mapping[str, nn.Parameter], ranks: int, collectives: Collectives) -> None:
        """Refuse a plan or network that is not for these parameters and ranks, before the first step."""
        if self.network is not None and self.network.world_size != ranks:
            raise NetworkError(
                f"the network was measured among {self.network.world_size} ranks and these are {ranks}: "
                f"measure it here, or give network.at({ranks})"
            )
        if self.network is not None:
            for kind in self.kinds:
                self.network.curve(kind)  # raises if it has no cost for it
        if self.plan is not None:
            layout_of(self.plan, list(parameters))
            for bucket in self.plan.buckets:
                dtypes = {parameters[name].dtype for name in bucket.names}
                if len(dtypes) > 1:
                    raise PlanError(f"the bucket of {bucket.names[0]} mixes {', '.join(map(str, dtypes))}: split it")
                if not collectives.runs(bucket.collective, *dtypes):
                    known = ", ".join(("dense", "bf16", *self.kinds))
                    raise PlanError(
                        f"the plan sends {bucket.names[0]} ({', '.join(map(str, dtypes))}) by {bucket.collective!r}: "
                        f"expected one of {known}" + ("; sparse kinds are for float32 alone" if self.kinds else "")
                    )


def model_described(module: nn.Module) -> list[str]:
    """A line per parameter and buffer, such that ranks with equal lines can train together."""
    parameters = {
        n: f"{n} {tuple(p.shape)} {p.dtype} grad={p.requires_grad} strides {p.stride()}"
        for n, p in module.named_parameters()
    }
    buffers = {n: f"buffer {n} {tuple(b.shape)} {b.dtype}" for n, b in module.named_buffers()}
    own_affair = getattr(module, "_ddp_params_and_buffers_to_ignore", ())  # DDP leaves these to each rank
    return [line for name, line in (parameters | buffers).items() if name not in own_affair]
