"""Random models, DDP arguments and ways to train: each case is drawn from a seed, and trained under either wrapper."""

import copy
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from anabranch import DataParallel
from parallel.twins import SCENARIOS, WIDTH, Model, batch, close, dtypes_of, ring, scatter, scattered, stage_of, state
from ranks import group_timeout

STEPS = 24  # a doubtful win is repeated within them
STEPS_TO_CACHE = 40  # of the first start: a choice is kept once a doubtful win was repeated
STEPS_OF_JOIN = 6  # after those, with another number on each rank
STEP_S = {True: 1e-3, False: 2e-3}  # of every trial, with a plan and without
TRAINED = ("linear", "tied", "norm", "conv", "embedding", "sparse", "double", "bfloat16", "float16", "scale")
LOSSES = ("two forwards", "forwards everywhere", "parameters", "grad first")  # beside a plain one
PARTS = (*TRAINED, "frozen", "unused", "sometimes")


@dataclass(frozen=True)
class Case:
    """One model, the arguments of DDP, how it is trained, and how DataParallel tunes it."""

    parts: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    delayed: bool  # the last part's gradients are delayed until the first's are ready
    no_sync: tuple[int, ...]  # passes of a step that accumulate, by step in turn
    zeros_kept: bool
    loss: str
    scenario: str
    checkpointed: str  # how activations of the second half are recomputed: "", "reentrant" or "saved tensors"
    hooked: bool  # the program has hooks of its own
    joins: bool  # ranks have different numbers of steps
    starts: int  # how often the model is wrapped and trained; later starts find the choices of earlier ones
    measured: bool  # the network, instead of given

    @property
    def may_plan(self) -> bool:
        """Whether DataParallel plans at all."""
        return not self.delayed and "sparse" not in self.parts

    @property
    def ends_with_plan(self) -> bool:
        """Whether a plan must be in force after training; where it is planned again and again, it may be."""
        return self.may_plan and self.scenario in ("keeps the plan", "is given the plan")

    @property
    def finds_choice(self) -> bool:
        """Whether the second start must find what the first one chose."""
        return self.may_plan and self.starts > 1 and self.scenario != "plans again and again"

    @property
    def text(self) -> str:
        """For messages."""
        return f"{asdict(self)}"


def drawn(seed: int) -> Case:
    """The case of this seed."""
    chance = random.Random(seed)
    parts = ["linear", *chance.choices(PARTS, weights=[3, *[1] * (len(PARTS) - 1)], k=chance.randint(1, 5)), "linear"]
    options: dict[str, Any] = {
        "find_unused_parameters": chance.random() < 0.4,
        "static_graph": chance.random() < 0.2,
        "gradient_as_bucket_view": chance.random() < 0.3,
        "bucket_cap_mb": chance.choice([None, 1e-4, 3e-4, 25]),
        "init_sync": chance.random() < 0.8,
        "broadcast_buffers": chance.choice([None, True, False]),
    }
    uneven = options["find_unused_parameters"] and not options["static_graph"]
    if not uneven:  # DDP itself would wait for ever
        parts = [part if part != "sometimes" else "linear" for part in parts]
    no_sync = chance.choices([0, 0, 1, 2], k=chance.randint(1, 3))
    if options["static_graph"]:
        no_sync[0] = 0  # DDP's own first step fails otherwise, with an internal assertion
    delayed = chance.random() < 0.15
    if delayed:
        no_sync = [0]  # a delayed all-reduce and the next pass would write to one buffer
    case = Case(
        tuple(parts),
        tuple((name, value) for name, value in options.items() if chance.random() < 0.8 or value is True),
        delayed=delayed,
        no_sync=tuple(no_sync),
        zeros_kept=chance.random() < 0.3,
        loss=chance.choice(["mean", "mean", *LOSSES]),
        scenario=chance.choice(
            ["plans again and again", "keeps the plan", "keeps the plan", "is given the plan", "goes back"]
        ),
        checkpointed=chance.choice(["", "", "reentrant", "saved tensors"]),
        hooked=chance.random() < 0.3,
        joins=chance.random() < 0.3,
        starts=chance.choice([1, 1, 2]),
        measured=chance.random() < 0.2,
    )
    return _possible(case)


def _possible(case: Case) -> Case:
    """The case without what fails or waits for ever under DDP itself, on one rank alone."""
    if case.checkpointed == "reentrant" and case.loss in ("grad first", "parameters"):
        case = replace(case, loss="mean")
    if case.starts > 1 and case.scenario == "is given the plan":  # nothing would be chosen
        case = replace(case, scenario="keeps the plan")
    if case.delayed or dict(case.options).get("static_graph"):
        case = replace(case, joins=False, checkpointed="" if case.delayed else case.checkpointed, hooked=False)
    if case.joins:  # a rank that has ended answers the collectives of a plain step, and no others
        parts = tuple(part if part not in ("norm", "sometimes", "unused") else "linear" for part in case.parts)
        case = replace(case, parts=parts, loss="mean", checkpointed="", no_sync=(0,))
    return case


class Mixture(nn.Module):
    """Parts in a row."""

    def __init__(self, parts: tuple[str, ...], checkpointed: str = "") -> None:
        super().__init__()
        self.kinds = parts
        self.checkpointed = checkpointed
        self.parts = nn.ModuleList(self._part(kind) for kind in parts)
        for kind, part in zip(parts, self.parts, strict=True):
            if kind == "tied":
                part.weight = self.parts[0].weight

    def _part(self, kind: str) -> nn.Module:
        dtypes = {"double": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
        dtype = dtypes.get(kind, torch.float32)
        if kind == "norm":
            return nn.BatchNorm1d(WIDTH)
        if kind == "conv":
            return nn.Conv1d(1, 1, 3, padding=1)
        if kind in ("embedding", "sparse"):
            return nn.Embedding(9, WIDTH, sparse=kind == "sparse")
        if kind == "scale":
            return nn.ParameterList([torch.ones(WIDTH)])
        return nn.Linear(WIDTH, WIDTH, dtype=dtype).requires_grad_(kind != "frozen")

    def forward(self, x: torch.Tensor, sometimes: bool) -> torch.Tensor:
        middle = len(self.parts) // 2
        if not self.checkpointed:
            return self._run(x, sometimes, 0, len(self.parts))
        x = self._run(x, sometimes, 0, middle)
        reentrant = self.checkpointed == "reentrant"
        out: torch.Tensor = checkpoint(self._run, x, sometimes, middle, len(self.parts), use_reentrant=reentrant)
        return out

    def _run(self, x: torch.Tensor, sometimes: bool, first: int, last: int) -> torch.Tensor:
        for kind, part in list(zip(self.kinds, self.parts, strict=True))[first:last]:
            if kind == "unused" or (kind == "sometimes" and not sometimes):
                continue
            if kind in ("embedding", "sparse"):
                x = x + part(x.detach().abs().mul(3).long().clamp(max=8)).mean(1)
            elif kind == "scale":
                x = x * part[0]  # type: ignore[index]
            elif kind == "conv":
                x = part(x[:, None])[:, 0]
            else:
                dtype = next(part.parameters()).dtype
                x = part(x.to(dtype)).float()
            x = x.tanh()
        return x


def train(model: Model, case: Case, count: int) -> None:
    """Some steps of plain SGD, which takes sparse gradients, too; then some with uneven inputs, if ranks join."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(count):
        one_step(model, optimizer, case, step)
        dist.barrier(model.process_group)  # nobody waits for delayed all-reduces; it waits for all that was begun
        optimizer.step()
    if case.joins:
        with model.join():
            for step in range(count, count + STEPS_OF_JOIN - 2 * dist.get_rank()):
                one_step(model, optimizer, case, step)
                optimizer.step()


def one_step(model: Model, optimizer: torch.optim.Optimizer, case: Case, step: int) -> None:
    """All passes of a step."""
    optimizer.zero_grad(set_to_none=not case.zeros_kept)
    passes = case.no_sync[step % len(case.no_sync)]
    for number in range(passes + 1):
        with model.no_sync() if number < passes else nullcontext():
            loss_of(model, case, 10 * step + number).backward()


def hook(module: Mixture, seen: list[str]) -> None:
    """Hooks as a program has them: one changes a gradient, others look."""
    first, last = module.parts[0], module.parts[-1]
    assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
    first.weight.register_hook(lambda gradient: 0.5 * gradient)
    last.weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    last.register_forward_hook(lambda *_: seen.append("forward"))
    first.register_full_backward_hook(lambda *_: seen.append("backward"))


def loss_of(model: Model, case: Case, step: int) -> torch.Tensor:
    """One rank's loss may differ from the others'."""
    x, sometimes = batch(step), (step + dist.get_rank()) % 2 == 0
    static = dict(case.options).get("static_graph", False)  # a graph that is always the same, by its contract
    odd_one = step % 3 == 1 and dist.get_rank() == 0 and not static
    loss: torch.Tensor = model(x, sometimes).square().mean()
    if case.loss == "two forwards" and odd_one and "norm" not in case.parts:
        loss = loss + model(batch(step + 5), sometimes).mean()
    if case.loss == "forwards everywhere" and "norm" not in case.parts:
        for more in range(1 + step % 2):
            loss = loss + model(batch(step + 5 + more), sometimes).mean()
    if case.loss == "grad first" and odd_one and not case.delayed:  # which hangs on the first part's gradient
        torch.autograd.grad(loss, model.module.parts[0].weight, retain_graph=True)
    if case.loss == "parameters" and odd_one and not {"unused", "sometimes", "sparse"} & {*case.parts}:
        loss = torch.stack([p.sum() for p in model.parameters() if p.requires_grad]).sum() * 0.0
    return loss


def outcome(
    case: Case, seed: int, group: dist.ProcessGroup, wrap: Callable[[nn.Module, dict[str, Any]], Model]
) -> dict[str, Any]:
    """The error's type, if there was one, the state after training, and what explain() said of each start."""
    torch.manual_seed(seed)
    module = Mixture(case.parts, case.checkpointed)
    seen: list[str] = []
    found: dict[str, Any] = {"error": "", "state": {}, "seen": seen, "stages": [], "planned": False}
    for start in range(case.starts):
        module = copy.deepcopy(module)
        if case.hooked:
            hook(module, seen)
        model = None
        try:
            model = wrap(module, {**options_for(module, case), "process_group": group})
            train(model, case, STEPS_TO_CACHE if start + 1 < case.starts else STEPS)
        except Exception as caught:
            found["error"] = f"{type(caught).__name__} {caught}"
        if model is not None:
            found["state"] = {name: tensor.clone() for name, tensor in state(model).items()}
        if isinstance(model, DataParallel):
            found["stages"].append(stage_of(model))
            found["planned"] = model.plan is not None
            model.close()
        dist.barrier()
        if found["error"]:
            break
    return found


def options_for(module: Mixture, case: Case) -> dict[str, Any]:
    """The arguments of DDP."""
    if not case.delayed:
        return dict(case.options)
    named = [(name, p) for name, p in module.named_parameters() if name.startswith(f"parts.{len(case.parts) - 1}.")]
    hooked = module.parts[0].weight  # its gradient comes later
    return {**dict(case.options), "delay_all_reduce_named_params": named, "param_to_hook_all_reduce": hooked}


def two_groups() -> list[dist.ProcessGroup]:
    """Groups for ``compared``: stock DDP's and ours, whose timeouts, one after the other, pass within a launch's.

    Where DDP has an error on one rank alone, the other waits until the timeout, and Gloo's group is of no use then. So
    it is with reentrant checkpoints and a second forward on rank 0, whose backward has a gradient twice.
    """
    groups = [dist.new_group(timeout=group_timeout() / 4) for _ in range(2)]
    return [group for group in groups if isinstance(group, dist.ProcessGroup)]


def compared(seed: int, groups: Sequence[dist.ProcessGroup]) -> tuple[list[str], bool]:
    """What differs in the case of this seed between DDP and DataParallel, and whether DDP failed.

    After a failure there may be all-reduces that nobody waits for: the next case needs fresh processes.
    """
    case = drawn(seed)

    def ours(module: nn.Module, options: dict[str, Any]) -> Model:
        plan = None
        if case.scenario == "is given the plan" and case.may_plan:
            plan = scatter(dtypes_of(module))
        return DataParallel(
            module,
            planner=scattered if case.starts == 1 else "per_tensor",  # choices of a function are not kept
            network=None if case.measured else ring(),
            profile_steps=1,
            cache=folder if case.starts > 1 else False,
            policy=SCENARIOS[case.scenario],
            plan=plan,
            **options,
        )

    theirs = outcome(case, seed, groups[0], lambda module, options: DistributedDataParallel(module, **options))
    with TemporaryDirectory() as folder:
        found = outcome(case, seed, groups[1], ours)
    apart = []
    if _kind(theirs["error"]) != _kind(found["error"]):
        apart.append(f"error {found['error']!r}, not {theirs['error']!r}")
    elif theirs["error"]:
        pass  # weights depend on whether all-reduces have ended that nobody waited for
    elif theirs["state"].keys() != found["state"].keys():
        apart.append(f"{sorted(theirs['state'].keys() ^ found['state'].keys())} in one only")
    else:
        tensors = theirs["state"].items()
        apart += ["hooks were called at other times"] if theirs["seen"] != found["seen"] else []
        apart += _unplanned(case, found)
        apart += [f"{name} differs" for name, tensor in tensors if not close(tensor, found["state"][name], 0.0)]
    return [f"seed {seed}: {what}; {case.text}" for what in apart[:2]], bool(theirs["error"])


def _kind(error: str) -> str:
    """The error's type; Gloo's RuntimeError may be a CollectiveError here."""
    return error.split(" ")[0].replace("CollectiveError", "RuntimeError")


def _unplanned(case: Case, found: dict[str, Any]) -> list[str]:
    """What the case was to bring into force, and did not."""
    said = []
    if case.scenario != "plans again and again" and found["planned"] != case.ends_with_plan:
        said.append(f"a plan is {'' if found['planned'] else 'not '}in force: {found['stages']}")
    if case.finds_choice and "as cached on" not in found["stages"][-1]:
        said.append(f"nothing was cached: {found['stages']}")
    return said
