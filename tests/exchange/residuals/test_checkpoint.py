"""A saved state with one thing wrong in it is refused with an error that names the field; nothing is changed."""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import anabranch as ab
from anabranch.exchange.dense import SUMMABLE_BELOW
from anabranch.exchange.residuals.checkpoint import check_saved
from anabranch.frameworks.comm_state import CommState, packed
from parallel.given_gradients import fresh, one_step, two_buckets
from ranks import on_ranks

State = dict[str, Any]
Corruption = tuple[str, str, Callable[[State], Any]]  # what it is, a word that its error must contain, the change

NOT_WHOLE: tuple[Any, ...] = (
    None,
    "1",
    1.5,
    2.0,
    True,
    -1,
    1 << 60,
    10**30,
    float("nan"),
    float("inf"),
    [],
    {},
    torch.tensor(1),
)
NOT_SCALES: tuple[Any, ...] = ("1", 0.0, -1.0, float("nan"), float("inf"), True, [], 1e300)
NOT_TILTS: tuple[Any, ...] = (
    None,
    "0",
    float("nan"),
    float("inf"),
    -float("inf"),
    1e9,
    -300.0,
    True,
    [0.0],
    torch.tensor(0.0),
)
NOT_LISTS: tuple[Any, ...] = (None, 7, "ab", {}, torch.zeros(2))
NOT_DICTS: tuple[Any, ...] = (None, 7, "ab", [], [("first", torch.zeros(1000))], torch.zeros(2))


def spoiled_tensors(piece: torch.Tensor) -> dict[str, Any]:
    """Tensors, and other things, that are no residual of the parameter of ``piece``."""
    numel = len(piece)
    one_bad = {f"one {bad}": torch.cat([piece[:-1], torch.tensor([bad])]) for bad in
               (float("nan"), float("inf"), -float("inf"), 3e38, -SUMMABLE_BELOW)}  # fmt: skip
    return one_bad | {
        "None": None,
        "a list": piece.tolist(),
        "text": "residual",
        "a number": 0.0,
        "shorter": piece[:-1],
        "longer": torch.cat([piece, piece[:1]]),
        "empty": piece[:0],
        "a scalar": piece[0],
        "of two dimensions": piece.view(2, -1),
        "a row": piece[None],
        "float64": piece.double(),
        "float16": piece.half(),
        "bfloat16": piece.bfloat16(),
        "int32": piece.int(),
        "bool": piece.bool(),
        "complex": piece.to(torch.complex64),
        "sparse": piece.to_sparse(),
        "on meta": torch.empty(numel, device="meta"),
    }


def put(*path: Any, value: Any) -> Callable[[State], None]:
    """The change that sets this field."""

    def change(state: State) -> None:
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = value

    return change


def drop(*path: Any) -> Callable[[State], None]:
    """The change that deletes this field."""

    def change(state: State) -> None:
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return change


def rename(field: str, old: str, new: Any) -> Callable[[State], None]:
    return lambda state: state[field].update({new: state[field].pop(old)})


def swap(field: str, one: str, other: str) -> Callable[[State], None]:
    return lambda state: state[field].update({one: state[field][other], other: state[field][one]})


def corruptions(state: State) -> Iterator[Corruption]:
    """Every field, deleted, of another type, out of its range, of another model."""
    for field in ("version", "rank", "world_size", "step", "residuals", "buckets"):
        yield f"no {field}", field, drop(field)
    for field in ("version", "rank", "world_size", "step", "steps_trained"):
        for value in NOT_WHOLE:
            yield f"{field} is {value!r}", field, put(field, value=value)
    for value in NOT_SCALES:
        yield f"scale is {value!r}", "scale", put("scale", value=value)
    for extra in ("other", "Residuals", 7):
        yield f"extra {extra}", str(extra), put(extra, value=1)
    for field in ("residuals", "velocities"):
        for value in NOT_DICTS:
            yield f"{field} is {value!r}", field, put(field, value=value)
        for what, value in spoiled_tensors(state[field]["first"]).items():
            yield f"{field} {what}", f"{field}['first']", put(field, "first", value=value)
        for name in ("another.model", "module.first", "", 7, None):
            yield f"{field} of {name!r}", field, rename(field, "first", name)
        yield f"{field} swapped", f"{field}['", swap(field, "first", "small")
        yield f"{field} and more", field, put(field, "further", value=torch.zeros(3))
    for value in NOT_DICTS:
        yield f"orders is {value!r}", "orders", put("orders", value=value)
    for strides in (None, "25, 1", [25.0, 1.0], [-25, 1], [1, 40]):
        yield f"order {strides!r}", "first", put("orders", "first", value=strides)
    yield "order of another model", "orders", put("orders", "another", value=[1, 2])
    yield from bucket_corruptions(state)


def bucket_corruptions(state: State) -> Iterator[Corruption]:
    for value in NOT_LISTS:
        yield f"buckets is {value!r}", "buckets", put("buckets", value=value)
        yield f"bucket is {value!r}", "buckets[0]", put("buckets", 0, value=value if value != {} else [])
        yield f"names is {value!r}", "buckets[0].names", put("buckets", 0, "names", value=value)
        yield f"boundaries is {value!r}", "buckets[0].boundaries", put("buckets", 0, "boundaries", value=value)
    for field in ("names", "tilt", "boundaries", "step"):
        yield f"bucket without {field}", f"buckets[0].{field}", drop("buckets", 0, field)
    yield "bucket and more", "buckets[0].'other'", put("buckets", 0, "other", value=0)
    yield "bucket twice", "buckets[1].names", lambda s: s["buckets"].append(copy.deepcopy(s["buckets"][0]))
    for value in NOT_TILTS:
        yield f"tilt is {value!r}", "buckets[0].tilt", put("buckets", 0, "tilt", value=value)
    for value in NOT_WHOLE:
        yield f"step of a bucket is {value!r}", "buckets[0].step", put("buckets", 0, "step", value=value)
    names = state["buckets"][0]["names"]
    for wrong in ([], names[:1], [names[0]] * 2, [*names, "another"], [*names, 7], [*names, "bias"]):
        field = "buckets[0].boundaries" if wrong in (names[:1], [*names, "bias"]) else "buckets[0].names"
        yield f"names are {wrong}", field, put("buckets", 0, "names", value=wrong)
    low, middle, high = state["buckets"][0]["boundaries"]
    for bounds in (
        [high, middle, low], [low, high, middle], [middle, low, high], [1, middle, high], [low, middle, high - 1],
        [low, middle, high + 1], [low, -1, high], [low, high + 5, high], [low, high], [low, middle, middle, high], [],
        [low, float(middle), high], [low, str(middle), high], [low, None, high], [low, float("nan"), high],
        [False, middle, high], [low, 1 << 70, high],
    ):  # fmt: skip
        yield f"boundaries are {bounds}", "buckets[0].boundaries", put("buckets", 0, "boundaries", value=bounds)


def trained_state(rank: int) -> State:
    """A state with residuals, velocities and a bucket with balanced regions."""
    model, parallel = fresh(two_buckets(0.1), momentum=0.9)
    for step in range(6):
        one_step(model, parallel, step, rank)
    kept = parallel.comm_state_dict()
    parallel.close()
    return kept


@pytest.fixture(scope="module")
def states() -> list[State]:
    return on_ranks(trained_state, 2)


def bits(state: State) -> Any:
    """A state as something that can be compared, bit by bit."""
    tensors = {kind: {n: p.view(torch.int32).tolist() for n, p in state.get(kind, {}).items()} for kind in
               ("residuals", "velocities")}  # fmt: skip
    return {**state, **tensors}


NUMELS = {"first": 1000, "second": 1000, "bias": 25, "small": 10}


def with_a_small_one(state: State) -> State:
    """The state, and residuals of another size, which can be swapped."""
    state = copy.deepcopy(state)
    for kind in ("residuals", "velocities"):
        state[kind]["small"] = torch.ones(10)
    return state


def test_every_corruption_is_refused_by_the_name_of_its_field(states: list[State]) -> None:
    whole = with_a_small_one(states[0])
    check_saved(whole, NUMELS)
    count = 0
    for what, field, change in corruptions(whole):
        if what == "order [1, 40]":  # of another memory format, which only a live model can tell
            continue
        spoiled = copy.deepcopy(whole)
        change(spoiled)
        count += 1
        with pytest.raises(ValueError) as caught:
            check_saved(spoiled, NUMELS)
            pytest.fail(f"accepted: {what}")
        assert field in str(caught.value), (what, str(caught.value))
        assert "expected" in str(caught.value) and len(str(caught.value)) < 600
    assert count >= 150


@pytest.mark.parametrize("absent", [(), ("scale",), ("velocities",), ("orders",), ("steps_trained",)])
def test_what_older_versions_wrote_is_accepted(absent: tuple[str, ...], states: list[State]) -> None:
    check_saved({name: value for name, value in states[0].items() if name not in absent}, NUMELS)


def refused_by_a_model(rank: int, states: list[State]) -> dict[str, Any]:
    """Corruptions that a live model is given, each after a good state; what it accepted, and whether it changed."""
    model, parallel = fresh(two_buckets(0.1), momentum=0.9)
    parallel.load_comm_state_dict(states[rank])
    before = bits(parallel.comm_state_dict())
    accepted, changed, obscure, count = [], [], [], 0
    further: list[Corruption] = [
        ("of another rank", "rank", put("rank", value=1 - rank)),
        ("of another world", "rank", put("world_size", value=3)),
        ("in another order", "first", put("orders", "first", value=[1, 40])),
    ]
    for what, field, change in [*corruptions(with_a_small_one(states[rank])), *further]:
        if "swapped" in what:
            continue
        spoiled = copy.deepcopy(states[rank])
        change(spoiled)
        count += 1
        try:
            parallel.load_comm_state_dict(spoiled)
            accepted.append(what)
        except (ValueError, ab.AnabranchError) as error:
            if field not in str(error):
                obscure.append(f"{what}: {error}")
        if bits(parallel.comm_state_dict()) != before:
            changed.append(what)
    for odd in (None, 7, "state", [states[rank]], torch.zeros(3)):
        try:
            parallel.load_comm_state_dict(odd)
            accepted.append(repr(odd))
        except ValueError:
            count += 1
    try:
        parallel.load_comm_state_dict(states[rank], states[rank])
        accepted.append("twice the same")
    except ValueError:
        count += 1
    parallel.load_comm_state_dict(states[rank])
    same = bits(parallel.comm_state_dict()) == before
    steps = [one_step(model, parallel, step, rank) for step in (6, 7)]
    parallel.close()
    return {"accepted": accepted, "changed": changed, "obscure": obscure, "count": count, "same": same,
            "applied": torch.stack(steps)}  # fmt: skip


def goes_on(rank: int) -> torch.Tensor:
    model, parallel = fresh(two_buckets(0.1), momentum=0.9)
    applied = [one_step(model, parallel, step, rank) for step in range(8)]
    parallel.close()
    return torch.stack(applied[6:])


def test_a_live_model_refuses_them_all_and_goes_on_from_the_good_one(states: list[State]) -> None:
    answers = on_ranks(refused_by_a_model, 2, states)
    for answer, expected in zip(answers, on_ranks(goes_on, 2), strict=True):
        assert answer["accepted"] == answer["changed"] == answer["obscure"] == []
        assert answer["count"] >= 150 and answer["same"]
        assert torch.equal(answer["applied"], expected)


class Recorder:
    """A model that only remembers what it was given."""

    process_group: Any = None

    def comm_state_dict(self) -> State:
        return {}

    def load_comm_state_dict(self, *states: Any) -> None:
        self.given = states


def entry_corruptions() -> Iterator[tuple[str, str, Callable[[dict[str, Any]], Any]]]:
    numbers = "anabranch/rank0/numbers"
    text = [b"", b"{", b"[1]", b"7", b"null", b'"a"', b"\xff\xfe", b'{"residuals": 1}', b"[" * 100_000]
    for content in text:
        yield f"{content[:20]!r}", numbers, put(numbers, value=torch.tensor(list(content), dtype=torch.uint8))
    for odd in (None, "text", torch.zeros(3), torch.zeros(2, 2, dtype=torch.uint8), [1, 2]):
        yield f"numbers {odd!r}", numbers, put(numbers, value=odd)
    yield "no numbers", numbers, drop(numbers)
    for key in ("other/first", "residuals", "residuals/", "velocity/first"):
        yield key, f"anabranch/rank0/{key}", put(f"anabranch/rank0/{key}", value=torch.zeros(3))
    yield "a list", "residuals/first", put("anabranch/rank0/residuals/first", value=[1.0])
    yield "nothing", "anabranch/rank", lambda entries: entries.clear()
    yield (
        "another name",
        "anabranch/rank",
        lambda entries: entries.update({key.replace("anabranch", "other"): entries.pop(key) for key in list(entries)}),
    )
    empty = torch.tensor(list(b"{}"), dtype=torch.uint8)
    yield "empty numbers beside residuals", "anabranch/rank0/", put(numbers, value=empty)


def test_entries_of_torchs_checkpoint_are_refused_by_name(states: list[State]) -> None:
    model: Any = Recorder()
    entries = {f"anabranch/rank0/{key}": value for key, value in packed(states[0])}
    CommState(model).load_state_dict(entries)
    assert bits(model.given[0]) == bits(json.loads(json.dumps({k: v for k, v in states[0].items() if k not in
                                         ("residuals", "velocities")})) | {k: states[0][k] for k in
                                         ("residuals", "velocities")})  # fmt: skip
    for what, key, change in entry_corruptions():
        spoiled = dict(entries)
        change(spoiled)
        with pytest.raises(ValueError) as caught:
            CommState(model).load_state_dict(spoiled)
            pytest.fail(f"accepted: {what}")
        assert key in str(caught.value), what
