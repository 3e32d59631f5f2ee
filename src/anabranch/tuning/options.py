"""The arguments of DataParallel that are not DDP's, the policy of its decisions, and ``ANABRANCH``, its switch.

``ANABRANCH=off`` needs no change of a program. Rank 0's environment counts.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

import torch.distributed as dist
from torch import nn

from anabranch.exchange.agreement import agree_on, check_same, from_rank_0, same_on_all_ranks
from anabranch.exchange.collectives import Collectives
from anabranch.exchange.interface import Group
from anabranch.exchange.nodes import ALONE, UNKNOWN, FoundNodes, GivenNodes, check_given, find_nodes
from anabranch.planning import PLANNERS
from anabranch.values.errors import FileError, NetworkError, PlanError
from anabranch.values.files import load_as
from anabranch.values.kinds.names import between_nodes, is_two_level
from anabranch.values.network import Network
from anabranch.values.plan import MAX_LANES, Plan
from anabranch.values.trace import Trace

SWITCH = "ANABRANCH"
OFF, ON = "off", ("", "on")
TURNED_OFF = "ANABRANCH=off turns it off"

Planner = Callable[[Trace, Network], Plan]


@dataclass(frozen=True, slots=True)
class TuningPolicy:
    """When a tuner tries, keeps and drops a plan, and what that may cost. The defaults suit training.

    warmup_steps         steps of training before anything is timed: DDP rebuilds in the second, and caches warm up
    settle_steps         steps that do not count after a change of buckets
    trial_steps          steps of one block: a plan and the layout in force run in turns, a block each
    max_pairs            pairs of blocks after which a plan that is not clearly faster is given up
    min_gain             share of the step time by which a plan must beat the layout in force: less is not worth it
    min_predicted_gain   predicted gain below which nothing is measured or tried
    lanes_min_gain       the same for a second lane
    obvious_gain         gain that one pair of blocks shows well enough, if every step of the plan was faster
    confidence           standard errors by which a gain must differ from zero, and a drift from noise
    first_search_steps   what the first search may cost, in steps of training; at least 0.3 s
    max_search_steps     steps after which a search tries no more plans; graphs are still compiled for the best one
    search_share         what all searching may cost once training has been long enough, as a share of training so far
    drift_check_steps    steps between two checks of rank 0 whether to plan again
    max_drift            share by which the step time may change, beyond its noise, before rank 0 plans again
    cut_share            what a cut of a compiled graph is taken to cost, as a share of a step, before it is measured;
                         on ResNet-50 (H200, float32) it was 1.2 %
    recompilations       how often a compiled model may be compiled once more after planning, to try other cuts
    late_gradients       warn if the first gradient is ready later than this share of backward: nothing can overlap then
    """

    warmup_steps: int = 3
    settle_steps: int = 1
    trial_steps: int = 3
    max_pairs: int = 5
    min_gain: float = 0.01
    min_predicted_gain: float = 0.02
    lanes_min_gain: float = 0.02
    obvious_gain: float = 0.25
    confidence: float = 3.0
    first_search_steps: int = 30
    max_search_steps: int = 1000
    search_share: float = 0.01
    drift_check_steps: int = 20
    max_drift: float = 0.10
    cut_share: float = 0.01
    recompilations: int = 1
    late_gradients: float = 0.9

    def __post_init__(self) -> None:
        for one in fields(self):
            name, value = one.name, getattr(self, one.name)
            least = 0 if name == "recompilations" else 1
            if one.type is int and (not isinstance(value, int) or value < least):
                raise ValueError(f"TuningPolicy {name} is {value!r}: expected a whole number, at least {least}")
            if one.type is float and (not isinstance(value, int | float) or value != value):
                raise ValueError(f"TuningPolicy {name} is {value!r}: expected a share, such as 0.01 for 1 %")
        if self.confidence < 0:
            raise ValueError(
                f"TuningPolicy confidence is {self.confidence!r}: expected a number from 0 on, such as 3.0"
            )


DEFAULT_POLICY = TuningPolicy()


@dataclass(frozen=True, slots=True)
class TuningOptions:
    """The arguments of DataParallel that are not DDP's.

    ``kinds``, ``excluded`` and ``mixes``: as in ``Collectives``.
    ``found_nodes``: what ranks found, once they have compared their machines.
    ``no_plan_reason``: what ranks found when they compared their models, if they cannot plan together.
    """

    planner: str | Planner
    plan: Plan | str | os.PathLike[str] | None
    network: Network | None
    lanes: int | None
    profile_steps: int
    kinds: tuple[str, ...] = ()
    excluded: Mapping[str, frozenset[str]] = field(default_factory=dict)
    mixes: bool = False
    cache: str | os.PathLike[str] | bool | None = None
    policy: TuningPolicy = DEFAULT_POLICY
    nodes: GivenNodes = "auto"
    found_nodes: FoundNodes = UNKNOWN
    no_plan_reason: str = ""

    def __post_init__(self) -> None:
        if self.plan is not None and not isinstance(self.plan, Plan | str | os.PathLike):
            raise ValueError(
                f"plan is a {type(self.plan).__name__}: expected a Plan, such as anabranch.load(path), or its path"
            )
        if self.network is not None and not isinstance(self.network, Network):
            raise ValueError(
                f"network is a {type(self.network).__name__}: expected a Network, such as anabranch.load(path)"
            )
        if isinstance(self.planner, str) and self.planner not in PLANNERS:
            raise ValueError(f"planner is {self.planner!r}: expected one of {', '.join(PLANNERS)}, or a function")
        if not isinstance(self.planner, str) and not callable(self.planner):
            raise ValueError(f"planner is {self.planner!r}: expected a name or a function (trace, network) -> Plan")
        if self.lanes is not None and not (isinstance(self.lanes, int) and 1 <= self.lanes <= MAX_LANES):
            raise ValueError(f"lanes is {self.lanes}: expected 1 to {MAX_LANES}, or None to choose")
        if not isinstance(self.profile_steps, int) or self.profile_steps < 0:
            raise ValueError(f"profile_steps is {self.profile_steps}: expected 0 or more")
        check_given(self.nodes)
        if not isinstance(self.policy, TuningPolicy):
            expected = "a TuningPolicy, such as TuningPolicy(min_gain=0.02)"
            raise ValueError(f"policy is a {type(self.policy).__name__}: expected {expected}")
        if not isinstance(self.cache, str | os.PathLike | bool | None) or self.cache == "":
            expected = "a folder, None or True for the user's own, or False for no cache"
            raise ValueError(f"cache is {self.cache!r}: expected {expected}")

    @property
    def turned_off(self) -> bool:
        """Whether ``ANABRANCH=off`` was found on rank 0."""
        return self.no_plan_reason == TURNED_OFF

    @property
    def uses_cache(self) -> bool:
        """Whether ranks ask rank 0 for a cached plan; rank 0's folder and environment may still turn the cache off.

        A planner that is a function has no cache: a file cannot tell whether the function has changed.
        """
        may_search = self.plan is None and self.profile_steps > 0
        return may_search and self.cache is not False and isinstance(self.planner, str)

    def described(self) -> list[str]:
        """The options as lines that must be the same on all ranks."""
        planner = self.planner
        given = self.plan.fingerprint if isinstance(self.plan, Plan) else self.plan and f"in {os.fspath(self.plan)!r}"
        return [
            f"planner {planner if isinstance(planner, str) else getattr(planner, '__qualname__', 'a function')}",
            f"plan {given}",
            f"network {self.network and (self.network.world_size, sorted(self.network.curves))}",
            f"lanes {self.lanes}",
            f"profile_steps {self.profile_steps}",
            f"cache {'off' if self.cache is False else 'on'}",  # rank 0's folder counts, so others may differ
            f"nodes {self.nodes}",
        ]

    def agreed(self, parts: Mapping[str, str], group: Group, *further: str, by_name: bool) -> "TuningOptions":
        """These options, with the plan that rank 0 reads if ``plan`` is a path, and the nodes found. Collective.

        If rank 0 finds ``ANABRANCH=off``, they are options for DDP's own buckets, and nothing is compared.

        Raises DisagreementError on all ranks if models (``parts``), options or ``further`` lines differ between ranks.
        DDP pairs parameters by position, and plans pair them by name: without ``by_name``, ranks whose parameters
        differ in their names alone can train, but not plan.
        """
        if is_off(group):
            return replace(self, plan=None, no_plan_reason=TURNED_OFF)
        lines = [f"{name} {part}" for name, part in parts.items()]
        if not same_on_all_ranks(list(parts.values()), group):
            check_same("the model", lines, group)
        check_same("the settings of DataParallel", [*self.described(), *further], group)
        reason = ""
        if not same_on_all_ranks(lines, group):
            if by_name:  # which the settings decide, so it is the same on all ranks
                check_same("the model", lines, group)
            reason = "parameters have other names on other ranks, and a plan names them"
        found_nodes = find_nodes(self.nodes, group)
        return replace(self.with_plan_loaded(group), found_nodes=found_nodes, no_plan_reason=reason)

    def with_plan_loaded(self, group: Group) -> "TuningOptions":
        """These options with the plan that rank 0 reads, if ``plan`` is a path. Collective.

        Raises FileError on all ranks if rank 0 cannot read a plan there.
        """
        if self.plan is None or isinstance(self.plan, Plan):
            return self
        plan, problem = None, ""
        if dist.get_rank(group) == 0:
            try:
                plan = load_as(Plan, self.plan)
            except FileError as error:
                problem = str(error)
        if problem_of_rank_0 := from_rank_0(problem.encode(), group).decode():
            raise FileError(problem_of_rank_0)
        return replace(self, plan=agree_on(Plan, plan, group))

    def check_fits(self, parameters: Mapping[str, nn.Parameter], ranks: int, collectives: Collectives) -> None:
        """Raise PlanError or NetworkError if plan or network do not fit these parameters and this number of ranks."""
        if self.network is not None and self.network.world_size != ranks:
            raise NetworkError(
                f"the network was measured among {self.network.world_size} ranks and these are {ranks}: "
                f"measure it here, or give network.at({ranks})"
            )
        if self.network is not None:
            for kind in self.kinds:
                self.network.curve(kind)  # raises if it has no cost for it
        self.check_plan_fits(parameters, collectives)

    def check_plan_fits(self, parameters: Mapping[str, nn.Parameter], collectives: Collectives) -> None:
        """Raise PlanError if a plan was given that does not fit these parameters."""
        if isinstance(self.plan, Plan):
            self.plan.indices(list(parameters))
            for bucket in self.plan.buckets:
                dtypes = {parameters[name].dtype for name in bucket.names}
                if len(dtypes) > 1:
                    raise PlanError(f"the bucket of {bucket.names[0]} mixes {', '.join(map(str, dtypes))}: split it")
                kind = bucket.collective
                if is_two_level(kind) and self.found_nodes in (UNKNOWN, ALONE):  # not yet known; or nothing is sent
                    kind = between_nodes(kind)
                elif is_two_level(kind) and collectives.nodes is None:
                    raise PlanError(
                        f"the plan sends {bucket.names[0]} by {kind!r}, which sums inside nodes, and exchanges are "
                        f"flat here: {self.found_nodes.why}"
                    )
                if not collectives.supports(kind, *dtypes):
                    known = ", ".join(dict.fromkeys(("dense", "bf16", "int8", *self.kinds)))
                    raise PlanError(
                        f"the plan sends {bucket.names[0]} ({', '.join(map(str, dtypes))}) by {bucket.collective!r}: "
                        f"expected one of {known}"
                        + ("; sparse kinds are for float32, bfloat16 and float16" if ":" in bucket.collective else "")
                    )


def is_off(group: Group, variables: Mapping[str, str] = os.environ) -> bool:
    """Whether ``ANABRANCH`` is off on rank 0. Collective.

    Raises ValueError on all ranks if it is neither off nor on.
    """
    value = from_rank_0(variables.get(SWITCH, "").strip().lower().encode(), group).decode()
    if value != OFF and value not in ON:
        raise ValueError(f"the environment variable {SWITCH} is {value!r} on rank 0: expected off, or on")
    return value == OFF
