"""DDP's constructor returns DataParallels inside the context, and stock DDPs before and after it."""

import gc
import weakref
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel, distributed

from anabranch import DataParallel, Network
from anabranch.frameworks.ddp_replacement import replaced_ddp
from parallel.twins import SCENARIOS, mlp, plain_train, scattered, sgd
from ranks import on_ranks


class OwnDDP(DistributedDataParallel):
    """A program's own class."""


def replaced(rank: int) -> dict[str, Any]:
    options = {
        "planner": scattered,
        "network": Network.ring(2, 1e-5, 1e-9),
        "profile_steps": 2,
        "policy": SCENARIOS["keeps the plan"],
    }
    with replaced_ddp(options) as outcomes:
        model: Any = DistributedDataParallel(mlp(), bucket_cap_mb=1)
        given = distributed.DistributedDataParallel(mlp(), profile_steps=0)  # type: ignore[call-arg]
        own = OwnDDP(mlp())
        for step in range(30):
            plain_train(model, sgd(model), step)
        kinds = [isinstance(one, DataParallel) for one in (model, given, own)]
        planned, gone = model.plan is not None, weakref.ref(model)
        del model
        gc.collect()
        said = [str(outcome) for outcome in outcomes]
    kinds.append(isinstance(DistributedDataParallel(mlp()), DataParallel))
    return {"kinds": kinds, "planned": planned, "freed": gone() is None, "said": said}


def test_what_ddps_constructor_makes() -> None:
    for answer in on_ranks(replaced, 2):
        assert answer["kinds"] == [True, True, False, False]
        assert answer["planned"] and answer["freed"]
        first, second = answer["said"]
        assert first.startswith("Sequential: ") and "× as fast. DDP's own buckets" in first and "predicted" in first
        assert second == "Sequential: nothing was tried: profile_steps is 0."


def with_a_hook(rank: int) -> str:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    with replaced_ddp({}) as outcomes:
        model = DistributedDataParallel(nn.Linear(4, 4))
        model.register_comm_hook(None, allreduce_hook)
        return str(outcomes[0])


def test_a_comm_hook_is_named_as_the_reason() -> None:
    for said in on_ranks(with_a_hook, 2):
        assert "no longer planning: the comm hook allreduce_hook was registered" in said
