"""The plan cache of a live training: each ingredient changes its key, and rank 0's files count on every rank."""

import logging
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import anabranch as ab
from anabranch.exchange.collectives import Collectives
from anabranch.exchange.dense import DenseExchanges
from anabranch.exchange.nodes import FoundNodes
from anabranch.exchange.quantised.exchange import QuantisedExchanges
from anabranch.observe import environment
from anabranch.tools.lab import rank_environment
from anabranch.tuning.cache_files import CachedChoice
from anabranch.tuning.options import TuningOptions
from anabranch.tuning.training_cache import TrainingCache, hardware_lines, key_lines, version_lines
from anabranch.tuning.trial import StepTimes, Trial
from anabranch.values.nodes import Nodes
from parallel.twins import batch, mlp
from ranks import on_ranks

CPU = torch.device("cpu")
OPTIONS = TuningOptions("optimal", None, None, None, 5)
TWO_NODES = FoundNodes(Nodes.of_size(4, 2), "nodes=2")


def choice_for(model: nn.Module, ranks: int, lanes: int = 1, **changes: Any) -> CachedChoice:
    """A choice that fits the model: all gradients in one bucket."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    tensors = tuple(ab.TensorSpec(name, numel, 4, 0.1, "float32") for name, numel in sizes.items())
    evidence: dict[str, Any] = {"step_s": 0.1, "spread_s": 0.01, "default_step_s": 0.2, "date": "2026-11-16"}
    nouns: dict[str, Any] = {
        "plan": ab.Plan((ab.Bucket(tuple(sizes), lanes - 1),)),
        "network": ab.Network.ring(ranks, 1e-5, 1e-9),
        "trace": ab.Trace(tensors, 0.1),
    }
    return CachedChoice(**{"label": "one bucket", **evidence, **nouns, **changes})


def cache_of(
    model: nn.Module,
    folder: str,
    options: TuningOptions = OPTIONS,
    settings: tuple[str, ...] = ("compress None",),
    nodes: Nodes | None = None,
) -> TrainingCache:
    assert dist.group.WORLD is not None
    collectives = Collectives(QuantisedExchanges(), DenseExchanges())
    collectives.use_nodes(nodes, dist.get_rank())
    parameters = dict(model.named_parameters())
    return TrainingCache(replace(options, cache=folder), settings, model, parameters, collectives, dist.group.WORLD)


def keep(cache: TrainingCache, choice: CachedChoice, **changes: Any) -> None:
    """Have the cache keep this choice, or one with another label, plan, steps or step under DDP's own buckets."""
    given: dict[str, Any] = {"label": choice.label, "plan": choice.plan, "steps_s": [choice.step_s] * 3}
    given |= {"own_s": choice.default_step_s, **changes}
    steps = tuple(StepTimes(seconds, 0.0, 0.0) for seconds in given["steps_s"])
    cache.write(Trial(given["label"], given["plan"], steps), given["own_s"], choice.network, choice.trace, None)


class Lines(logging.Handler):
    """What the library's logger says on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        logging.getLogger("anabranch").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())

    def ended(self) -> list[str]:
        """What it has said until now; nothing is added any more."""
        logging.getLogger("anabranch").removeHandler(self)
        return self.found


# ------------------------------------------------------------------------------------------------------- the key


def keys(rank: int, folder: str) -> list[str]:
    """The names of the files of trainings that differ in one thing each."""
    assert dist.group.WORLD is not None
    network = ab.Network.ring(1, 1e-5, 1e-9)
    frozen, halved = nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()
    frozen.bias.requires_grad_(False)

    class Linear(nn.Linear):
        pass

    renamed = Linear(2, 2)
    type(renamed).__name__ = "Renamed"
    cases: list[tuple[nn.Module, TuningOptions, tuple[str, ...], tuple[int, ...]]] = [
        (nn.Linear(2, 2), OPTIONS, ("compress None",), (8, 2)),
        (nn.Linear(2, 2), OPTIONS, ("compress None",), (16, 2)),
        (nn.Linear(2, 2), OPTIONS, ("compress bf16",), (8, 2)),
        (nn.Linear(2, 2), replace(OPTIONS, planner="asc"), ("compress None",), (8, 2)),
        (nn.Linear(2, 2), replace(OPTIONS, lanes=1), ("compress None",), (8, 2)),
        (nn.Linear(2, 2), replace(OPTIONS, kinds=("bf16",)), ("compress None",), (8, 2)),
        (nn.Linear(2, 2), replace(OPTIONS, network=network), ("compress None",), (8, 2)),
        (nn.Linear(2, 2), replace(OPTIONS, network=replace(network, meta={"x": 1})), ("compress None",), (8, 2)),
        (nn.Linear(2, 2, bias=False), OPTIONS, ("compress None",), (8, 2)),
        (nn.Linear(2, 3), OPTIONS, ("compress None",), (8, 2)),
        (frozen, OPTIONS, ("compress None",), (8, 2)),
        (halved, OPTIONS, ("compress None",), (8, 2)),
        (renamed, OPTIONS, ("compress None",), (8, 2)),
        (nn.Linear(2, 2), replace(OPTIONS, nodes=False), ("compress None",), (8, 2)),
        (nn.Linear(2, 2), replace(OPTIONS, found_nodes=TWO_NODES), ("compress None",), (8, 2)),
    ]
    for number, (model, options, settings, shape) in enumerate(cases):
        cache = cache_of(model, f"{folder}/{number}", options, settings)
        cache.note_input((torch.zeros(shape),), {})
        cache.note_input((torch.zeros(9, 9),), {})  # only the first counts
        assert cache.read(dist.group.WORLD, 64) is None
        keep(cache, choice_for(nn.Linear(2, 2), 1))
    again = cache_of(nn.Linear(2, 2), f"{folder}/again")
    again.note_input({"x": [torch.zeros(8, 2)]})
    again.read(dist.group.WORLD, 64)
    keep(again, choice_for(nn.Linear(2, 2), 1))
    names = [path.name for number in range(len(cases)) for path in Path(folder, str(number)).iterdir()]
    assert [path.name for path in Path(folder, "again").iterdir()] == names[:1], "the same training, the same file"
    return names


def alone(rank: int, folder: str) -> list[list[Any]]:
    return [keys(rank, f"{folder}/keys"), evidence(rank, f"{folder}/evidence")]


def test_each_ingredient_changes_the_key_and_the_evidence_is_the_median_step_with_its_spread(tmp_path: Path) -> None:
    ((names, found),) = on_ranks(alone, 1, str(tmp_path))
    assert len(set(names)) == len(names) == 15
    assert found == ["kept", 3.0, 2.0, 2.0]


def test_lines_of_the_process_group_and_the_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [key_lines(OPTIONS, 2, "gloo"), key_lines(OPTIONS, 4, "gloo"), key_lines(OPTIONS, 2, "nccl")]
    for variable in (environment.NETWORK_NOTE, environment.LAB):
        monkeypatch.setenv(variable, "2 hosts, 1 Gbit/s links")
        found.append(key_lines(OPTIONS, 2, "gloo"))
    assert len({tuple(lines) for lines in found}) == len(found)


def test_the_lab_sets_the_variable_that_the_key_reads() -> None:
    assert environment.LAB == rank_environment.LAB


def hardware(rank: int) -> dict[str, list[str]]:
    """The lines of three ranks, by their hosts and each host's number of cores."""
    assert dist.group.WORLD is not None
    found = {}
    for hosts, devices in (("aab", "884"), ("xxy", "884"), ("aba", "884"), ("aab", "888")):
        socket.gethostname = lambda hosts=hosts: hosts[rank]  # type: ignore[misc]
        os.cpu_count = lambda devices=devices: int(devices[rank])  # type: ignore[misc]
        found[f"{hosts} {devices}"] = hardware_lines(CPU, dist.group.WORLD)
    return found


def test_hosts_have_numbers_and_no_names() -> None:
    found, *_ = on_ranks(hardware, 3)
    here = found["aab 884"]
    assert found["xxy 884"] == here
    assert here[0] == "hosts 2 × 0, 1 × 1" and here[1].startswith("devices 2 × CPU ") and ", 1 × CPU " in here[1]
    assert found["aba 884"] != here and found["aab 888"] != here


def test_versions_are_those_of_the_programs() -> None:
    assert version_lines(CPU) == [f"anabranch {ab.__version__}", f"torch {torch.__version__}"]


# ------------------------------------------------------------------------------------------------------ agreement


def agreed(rank: int, folders: list[str], case: str) -> list[Any]:
    """What this rank gets, and says; the file of its folder, if it has one, is written for ``case``."""
    assert dist.group.WORLD is not None
    lines, model = Lines(), mlp()
    asked: dict[str, dict[str, Any]] = {
        "more lanes than were asked for": {"lanes": 1},
        "another network than was given": {"network": ab.Network.ring(2, 1e-5, 2e-9)},
        "a kind that a gradient must not use": {"kinds": ("int8",), "excluded": {"int8": frozenset({"0.bias"})}},
    }
    nodes = Nodes.of_size(2, 1) if case == "two levels" else None
    cache = cache_of(model, folders[rank], replace(OPTIONS, **asked.get(case, {})), nodes=nodes)
    cache.note_input(batch(0, rows=4 + rank))  # other batches on other ranks
    assert cache.read(dist.group.WORLD, 64) is None
    choice = choice_for(model, 2, label=f"of rank {rank}")
    if case == "other ranks":
        choice = choice_for(model, 4)
    elif case == "other gradients":
        choice = choice_for(mlp(2), 2)
    elif case == "other sizes":
        tensors = [replace(tensor, numel=1) for tensor in choice.trace.tensors]
        choice = replace(choice, trace=replace(choice.trace, tensors=tuple(tensors)))
    elif case == "unknown kind":
        assert choice.plan is not None
        choice = replace(choice, plan=ab.Plan((replace(choice.plan.buckets[0], collective="gossip"),)))
    elif case == "a kind that was not asked for":
        assert choice.plan is not None
        choice = replace(choice, plan=ab.Plan((replace(choice.plan.buckets[0], collective="int8"),)))
    elif case == "a kind that a gradient must not use":
        assert choice.plan is not None
        choice = replace(choice, plan=ab.Plan((replace(choice.plan.buckets[0], collective="int8"),)))
        dense = choice.network.curve("dense")
        choice = replace(choice, network=replace(choice.network, curves={"dense": dense, "int8": dense}))
    elif case in ("two levels", "two levels without nodes"):
        assert choice.plan is not None
        choice = replace(choice, plan=ab.Plan((replace(choice.plan.buckets[0], collective="dense@nodes"),)))
    elif case == "many lanes":
        choice = choice_for(model, 2, lanes=3)
    elif case == "more lanes than were asked for":
        choice = choice_for(model, 2, lanes=2)
    elif case == "no plan":
        choice = replace(choice, plan=None)
    keep(cache, choice)
    if rank == 1 and folders[1] != folders[0]:  # a rank's own file, as another run on its host would have left it
        Path(folders[1]).mkdir(exist_ok=True)
        for path in Path(folders[0]).glob("*.json"):
            Path(folders[1], path.name).write_bytes(path.read_bytes().replace(b"of rank 0", b"of rank 1"))
    dist.barrier()
    found = cache.read(dist.group.WORLD, 2)
    assert found is None or found == replace(choice, label=found.label, spread_s=0.0, date=found.date)
    return [None if found is None else found.label, lines.ended()]


FIT = ("fits", "no plan", "two levels")
UNFIT = {
    "other ranks": "the network was measured among 4 ranks and these are 2",
    "other gradients": "the plan leaves out",
    "other sizes": "its trace has other gradients than this model trains",
    "unknown kind": "by 'gossip': expected one of",
    "a kind that was not asked for": "sends gradients by int8, which this training did not ask for",
    "two levels without nodes": "sends gradients by dense@nodes, which this training did not ask for",
    "many lanes": "its plan needs 3 lanes: expected at most 2",
    "more lanes than were asked for": "its plan needs 2 lanes: expected at most 1",
    "another network than was given": "its network is not the one that was given",
    "a kind that a gradient must not use": "sends 0.bias by int8, which must not be used for it",
}


def all_agreed(rank: int, folder: str) -> dict[str, Any]:
    """Every case of agreement, each in folders of its own."""
    answers = {case: agreed(rank, [f"{folder}/{case} 0", f"{folder}/{case} 1"], case) for case in FIT}
    answers["only elsewhere"] = agreed(rank, [f"{folder}/file", f"{folder}/only"], "fits")
    answers |= {case: agreed(rank, [f"{folder}/{case}"] * 2, case) for case in UNFIT}
    answers["refused by one"] = refused_by_one(rank, f"{folder}/refused")
    return answers


def test_ranks_agree_on_what_rank_0_reads(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    first, second = on_ranks(all_agreed, 2, str(tmp_path))
    for case in FIT:
        assert first[case] == second[case] == ["of rank 0", []], "where folders differ, that of rank 0 counts"
    label, (line,) = first["only elsewhere"]
    assert label is None and "the plan cache cannot keep" in line and second["only elsewhere"] == [None, []]
    for case, says in UNFIT.items():
        label, (line,) = first[case]
        assert label is None and says in line and str(tmp_path) in line and second[case] == [None, []], case
    assert first["refused by one"] == [True, []]
    refused, (line,) = second["refused by one"]
    assert refused and "on rank 1: its plan needs 1 lanes" in line, "what one rank cannot run no rank runs"


def evidence(rank: int, folder: str) -> list[Any]:
    """What is kept of five steps; and that nothing that was measured can raise on rank 0 alone."""
    assert dist.group.WORLD is not None
    lines, model = Lines(), mlp()
    cache, choice = cache_of(model, folder), choice_for(model, 1)
    keep(cache, choice, label="too early", steps_s=[1.0], own_s=2.0)
    assert cache.read(dist.group.WORLD, 2) is None
    for steps_s, default_step_s in (([], 1.0), ([0.0], 1.0), ([float("nan")], 1.0), ([1.0], 0.0), ([1.0], -1.0)):
        keep(cache, choice, label="nothing", steps_s=steps_s, own_s=default_step_s)
    keep(cache, choice, label="other gradients", plan=choice_for(mlp(2), 1).plan, steps_s=[1.0], own_s=1.0)
    assert len(lines.found) == 6 and cache.read(dist.group.WORLD, 2) is None
    keep(cache, choice, label="kept", steps_s=[3.0, 1.0, 2.0, 5.0, 4.0], own_s=6.0)
    found = cache.read(dist.group.WORLD, 2)
    assert found is not None and found.trace == choice.trace
    return [found.label, found.step_s, found.spread_s, found.gain]


def refused_by_one(rank: int, folder: str) -> list[Any]:
    """The choice needs one lane more than rank 1 may have."""
    assert dist.group.WORLD is not None
    lines, cache = Lines(), cache_of(mlp(), folder)
    assert cache.read(dist.group.WORLD, 1) is None
    keep(cache, choice_for(mlp(), 2))
    return [cache.read(dist.group.WORLD, 1 - rank) is None, lines.ended()]


# ------------------------------------------------------------------------------------------------------- wrappers


def wrapped(rank: int) -> dict[str, Any]:
    """Whether a wrapper has a cache, before and after it was closed; and what ranks say who do not agree on it."""
    options: dict[str, dict[str, Any]] = {
        "dense": {},
        "lean": {"memory": ab.Lean(lambda parameters: torch.optim.SGD(parameters, lr=0.1))},
        "off": {"cache": False},
        "function": {"planner": ab.planners.single},
        "given": {"plan": choice_for(mlp(), 2).plan},
        "never": {"profile_steps": 0},
    }
    found: dict[str, Any] = {}
    for kind, given in options.items():
        model = ab.DataParallel(mlp(), **given)
        cache = model._tuner._cache if model._tuner is not None else None
        if cache is not None:
            model(batch(0)).square().mean().backward()
            assert cache._input == "4x6 float32"
        model.close()
        found[kind] = cache is not None
    with pytest.raises(ab.DisagreementError) as caught:
        ab.DataParallel(mlp(), cache=rank == 0)
    return {**found, "on and off": str(caught.value)}


def test_who_has_a_cache() -> None:
    for found in on_ranks(wrapped, 2):
        message = found.pop("on and off")
        assert "rank 0 has 'cache on'" in message and "rank 1 has 'cache off'" in message
        assert {kind for kind, has_cache in found.items() if has_cache} == {"dense", "lean"}


@pytest.mark.parametrize("cache", [1, "", b"x", 0.5, []])
def test_a_wrong_cache_argument_is_refused(cache: Any) -> None:
    with pytest.raises(ValueError, match=r"cache is .+: expected a folder"):
        replace(OPTIONS, cache=cache)
