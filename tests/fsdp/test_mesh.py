"""Ranks that were given different things, or one of which fails: all get an error, and none waits for another."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import anabranch as ab
from anabranch.fsdp.find_sharding import _spare_nbytes
from anabranch.fsdp.watch import Watch
from fsdp.small_model import Block, model_of, oktopk, train, two_nodes
from ranks import on_ranks

WIDTH = 16
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def build(layers: int = 3, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def step(model: nn.Module) -> None:
    model(torch.randn(4, WIDTH)).square().mean().backward()


def broken() -> nn.Module:
    raise OSError("no weights here")


def error_of(call: Callable[[], object]) -> str:
    """What was raised. A rank that waits for another gets the timeout of the group, and Gloo's words for it."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def check(found: list[list[str]], expected: list[tuple[str, str]]) -> None:
    """By rank and case; ``expected`` on the rank that is at fault, the last one, and on the others."""
    for rank, cases in enumerate(found):
        assert len(cases) == len(expected)
        for text, (at_fault, elsewhere) in zip(cases, expected, strict=True):
            assert (at_fault if rank == len(found) - 1 else elsewhere) in text


def both(words: str) -> tuple[str, str]:
    return words, words


# -------------------------------------------------------------------------------------------------- find_sharding


def trials(rank: int) -> list[str]:
    flat, nodes = init_device_mesh("cpu", (4,)), two_nodes()
    odd = rank == 3
    cases: list[tuple[Any, DeviceMesh, dict[str, Any]]] = [
        (build, flat, {"memory_nbytes": None if odd else 1 << 30}),
        (build, flat, {"memory_nbytes": 0 if odd else None}),
        (build, flat, {"rounds": 7 if odd else 5}),
        (build, flat, {"steps": 0 if odd else 3}),
        (build, flat, {"blocks": ["0", "1"] if odd else ["0", "1", "2"]}),
        (build, flat, {"mp_policy": HALF} if odd else {}),
        (build, nodes, {"compress": "int8" if odd else None}),
        (build, nodes, {"compress": "int9" if odd else "int8"}),
        (build, flat if odd else nodes, {}),
        (broken if odd else build, nodes, {}),
        ((lambda: build(layers=4)) if odd else build, nodes, {}),
        ((lambda: build(width=17)) if odd else build, flat, {}),
    ]
    return [error_of(partial(ab.find_sharding, make, mesh, step, **options)) for make, mesh, options in cases]


def test_trials_need_the_same_on_all_ranks() -> None:
    given = "what find_sharding() was given is not the same on all ranks: rank 0 has"
    failed = "find_sharding() failed on ranks 3, and not here; rank 3: ValueError"
    check(
        on_ranks(trials, 4, timeout_s=100),
        [
            both(f"{given} 'memory_nbytes 1073741824' (item 2), rank 3 has 'memory_nbytes None'"),
            ("memory_nbytes is 0: expected a number of bytes", failed),
            both(f"{given} 'rounds 5'"),
            ("rounds is 5 and steps is 0", failed),
            both(f"{given} \"blocks ['0', '1', '2']\""),
            both(given),
            both(f"{given} 'compress None' (item 5), rank 3 has 'compress int8'"),
            ("compress is 'int9'", failed),
            both(f"{given} \"mesh of cpu, dimensions ('replicate', 'shard'), ranks [[0, 1], [2, 3]]\""),
            ("OSError: no weights here", "build() failed on ranks 3, and not here; rank 3: OSError('no weights here')"),
            both("the model of build() is not the same on all ranks: rank 0 has nothing after item 6"),
            both("the model of build() is not the same on all ranks: rank 0 has '0.weight (16, 16) torch.float32"),
        ],
    )


def unwatchable(rank: int) -> list[str]:
    """Steps that can be recorded on all ranks but one."""

    def not_recorded(self: Watch) -> NoReturn:
        raise RuntimeError("no step was recorded")

    if rank == 1:
        Watch.timeline = not_recorded  # type: ignore[method-assign]
    return [error_of(lambda: ab.find_sharding(build, init_device_mesh("cpu", (2,)), step))]


def test_a_step_that_one_rank_cannot_record_is_an_error_everywhere() -> None:
    check(on_ranks(unwatchable, 2), [("RuntimeError: no step was recorded", "recording steps failed on ranks 1")])


def spare(rank: int) -> int:
    """As on GPUs: ranks 0 and 1 share one, on which 1000 bytes are free; the others have more."""
    shared = rank < 2
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="shared" if shared else f"own {rank}")  # type: ignore[assignment, misc]
    torch.cuda.mem_get_info = lambda device=None: (1000 if shared else 900, 10_000)
    torch.cuda.memory_reserved = lambda device=None: 300
    torch.cuda.max_memory_allocated = lambda device=None: 200
    model = ab.shard(nn.Sequential(nn.Linear(4, 2, bias=False)), mesh := init_device_mesh("cpu", (4,)))
    return _spare_nbytes(model, mesh, torch.device("cuda"))


def test_the_fullest_rank_decides_how_much_is_left() -> None:
    """Of 32 bytes of weights the first two ranks hold 16 each, and as many of gradients."""
    assert on_ranks(spare, 4) == [int(0.8 * (1000 // 2 + 300 - 200 - 32))] * 4


# ---------------------------------------------------------------------------------------------------------- shard


def shardings(rank: int, plan: str) -> list[str]:
    mesh, nodes = init_device_mesh("cpu", (4,)), two_nodes()
    odd = rank == 3
    model = build()
    cases: list[tuple[nn.Module, DeviceMesh, Any, dict[str, Any]]] = [
        (build(), mesh, f"{plan}-of-another-host" if odd else plan, {}),
        (nn.Linear(2, 2) if odd else build(), mesh, None, {}),
        (build(layers=4 if odd else 3), nodes, None, {}),
        (build(width=17 if odd else 16), nodes, None, {}),
        (build(), mesh, None, {"mp_policy": HALF} if odd else {}),
        (model, mesh, None, {"ignored_params": {model[0].weight} if odd else set()}),  # type: ignore[index]
        (build(), mesh, None, {"reshard_after_forward": True} if odd else {}),
        (build(), mesh if odd else nodes, None, {}),
    ]
    return [error_of(partial(ab.shard, one, on, by, **options)) for one, on, by, options in cases]


def test_shards_need_the_same_on_all_ranks(tmp_path: Any) -> None:
    ab.sharded.save(ab.ShardingPlan.per_block(["0", "1", "2"]), tmp_path / "plan.json")
    failed = "ab.shard() failed on ranks 3, and not here; rank 3: "
    check(
        on_ranks(shardings, 4, str(tmp_path / "plan.json")),
        [
            ("FileError", f"{failed}FileError"),
            ("Linear has no list of layers", f"{failed}ValueError"),
            both("the sharding plan is not the same on all ranks"),
            both("the model given to ab.shard() is not the same on all ranks: rank 0 has '0.weight (16, 16)"),
            both("an option of ab.shard() is not the same on all ranks: rank 0 has nothing after item 0"),
            both("rank 0 has 'ignored_params []' (item 1), rank 3 has \"ignored_params ['0.weight']\""),
            ("reshard_after_forward is for the plan to say", f"{failed}ValueError"),
            both("is not the same on all ranks: rank 0 has \"mesh of cpu, dimensions ('replicate', 'shard')"),
        ],
    )


def same_options(rank: int) -> list[str]:
    """Functions and parameters are other objects on every rank."""
    model, mesh = build(), init_device_mesh("cpu", (2,))

    def anywhere(parameter: nn.Parameter, why: object) -> None:
        return None

    place = partial(anywhere, why=object())  # prints an address
    ignored = {model.get_parameter("0.weight"), model.get_parameter("1.bias")}
    return [error_of(lambda: ab.shard(model, mesh, shard_placement_fn=place, ignored_params=ignored))]


def test_options_are_compared_by_their_names() -> None:
    assert on_ranks(same_options, 2) == [["nothing was raised"]] * 2


def test_a_mesh_is_asked_for() -> None:
    with pytest.raises(ValueError, match="mesh is None: expected a DeviceMesh"):
        ab.shard(build(), None)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ replicate


def replications(rank: int) -> list[str]:
    nodes, flat, odd = two_nodes(), init_device_mesh("cpu", (4,)), rank == 3

    def model() -> nn.Module:
        return model_of(nodes["shard"])

    def deeper() -> nn.Module:
        return ab.shard(nn.Sequential(nn.Linear(7, 24), Block(), Block()), nodes["shard"])

    in_one_node = deeper() if rank > 1 else model()
    cases: list[tuple[nn.Module, DeviceMesh, Any]] = [
        (build() if odd else model(), nodes, None),
        (model(), flat if odd else nodes, None),
        (model(), nodes, "int9" if odd else None),
        (model(), nodes, "int8" if rank % 2 else "int4"),  # the same along each line between nodes
        (in_one_node, nodes, None),
    ]
    return [error_of(partial(ab.replicate, one, mesh, kind)) for one, mesh, kind in cases]


def test_replications_need_the_same_on_all_ranks() -> None:
    failed = "ab.replicate() failed on ranks 3, and not here; rank 3: ValueError"
    check(
        on_ranks(replications, 4),
        [
            ("the model has no unit that is trained", failed),
            ("mesh has 1 dimension: expected two", failed),
            ("compress is 'int9'", failed),
            both("the sharded model is not the same on all ranks: rank 0 has 'compress int4'"),
            both('the sharded model is not the same on all ranks: rank 0 has "the root unit'),
        ],
    )


def later(rank: int) -> list[str]:
    """What is given after replicate(): a scaler on the ranks of one line between nodes, a state on one rank alone."""
    mesh, found = two_nodes(), []
    state: dict[str, Any] = {}
    for case in ("save", "follow", "load", "follow late"):
        model = model_of(mesh["shard"])
        replication = ab.replicate(model, mesh, compress=oktopk())
        if case == "save":
            train(model, range(3))
            state = replication.state_dict()
        elif case == "follow late":
            train(model, range(1))
            found.append(error_of(partial(replication.follow, torch.amp.GradScaler("cpu"))))
        else:
            if case == "follow" and rank % 2:
                replication.follow(torch.amp.GradScaler("cpu"))
            elif case == "load" and rank == 3:
                replication.load_state_dict(state)
            found.append(error_of(partial(train, model, range(1))))
        replication.close()
    return found


def test_what_is_given_later_is_compared_in_the_first_backward() -> None:
    found = on_ranks(later, 4)
    for rank, (follow, load, late) in enumerate(found):
        assert "what Replication.follow() was given is not the same on all ranks" in follow
        words = "the state of the replication is not the same" if rank in (1, 3) else "comparing what was loaded failed"
        assert words in load
        assert "follow() of a Replication after steps were made" in late
