"""What only a GPU can show of sharded models: FSDP2's streams, NCCL groups of some ranks, and times by CUDA events.

One lab of two hosts with two ranks each runs this file as its program, on one GPU; the tests read what the ranks found.

    pytest -m gpu tests/fsdp/test_gpu.py

The program also runs on CPUs, where there is nothing to see but that it runs:

    anabranch lab --hosts 2 --ranks-per-host 2 --rate unshaped -- python tests/fsdp/test_gpu.py FOLDER
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import anabranch as ab
from anabranch.exchange.agreement import from_all_ranks
from anabranch.fsdp import find_sharding as sharding_trial
from anabranch.fsdp.shard import no_groups_reason
from anabranch.tools.cli.ranks import join
from fsdp.small_model import weights
from gpu import ON_GPU, no_waiting

NODES, RANKS = 2, 4
WIDTH, INNER, BLOCKS, BATCH = 512, 1025, 4, 32
NAMES = [str(number) for number in range(1, BLOCKS + 1)]
LAB_S = 75  # then it ends
KINDS: dict[str, Any] = {
    "bf16": "bf16",
    "int8": "int8",
    "int4": "int4",
    "oktopk": ab.OkTopk(density=0.05, warmup_steps=0),
}
HALF = {
    "float32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}

# ------------------------------------------------------------------------------------------------ the ranks' program


class Block(nn.Module):
    """Some of its sizes two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, INNER), nn.LayerNorm(INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.as_tensor(self.down(torch.relu(self.norm(self.up(x)))))


class Program:
    """The device and the mesh of this rank, and the checks; each returns what its test looks at."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.device = folder, join(None)
        kind = self.device.type
        self.mesh = init_device_mesh(kind, (NODES, RANKS // NODES), mesh_dim_names=("replicate", "shard"))
        self.all = init_device_mesh(kind, (RANKS,))

    def run(self) -> None:
        """All checks, each of which leaves a file, also if it fails."""
        sharding_trial.MEASURING_S = 0.5
        checks: dict[str, Callable[[], dict[str, Any]]] = {
            "dense": self.dense,
            **{name: partial(self.kind, name) for name in KINDS},
            "watch": partial(self.watched, "int8"),
            "watch_stock": partial(self.watched, None),
            "units": self.units,
            "resume": self.resume,
            "scaler": self.scaler,
            "planned": partial(self.found, self.all, None),
            "planned_nodes": partial(self.found, self.mesh, "int8"),
        }
        for name, check in checks.items():
            began = perf_counter()
            try:
                found = check()
            except Exception:
                found = {"error": traceback.format_exc()}
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            took = {"seconds": perf_counter() - began}
            Path(self.folder, f"{name}-{dist.get_rank()}.json").write_text(json.dumps({**found, **took}))
            if dist.get_rank() == 0:
                print(f"{name}: {perf_counter() - began:.1f} s {found.get('error', '')}", flush=True)
        dist.destroy_process_group()

    def whole(self) -> nn.Sequential:
        torch.manual_seed(0)
        with self.device:
            return nn.Sequential(nn.Linear(7, WIDTH), *(Block() for _ in range(BLOCKS)))

    def sharded(self, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> nn.Sequential:
        """A unit per block, and one for the rest."""
        model = self.whole()
        options: dict[str, Any] = {} if policy is None else {"mp_policy": policy}
        for block in list(model)[1:]:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        return model

    def batch(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        return torch.randn(BATCH, 7, generator=generator).to(self.device)

    def train(
        self, model: nn.Module, steps: Sequence[int], optimizer: torch.optim.Optimizer | None = None
    ) -> list[float]:
        """Train some steps, without waiting for the device between them; losses of this rank."""
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.02)
        batches = [self.batch(step) for step in steps]
        losses = []
        for batch in batches:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses).tolist()

    def step_unwaited(self, model: nn.Module) -> None:
        """One more step, in which the host waits for nothing."""
        batch = torch.ones(BATCH, 7, device=self.device)
        with self.unwaited():
            batch_loss(model, batch).backward()

    def unwaited(self) -> Any:
        """Where there is a GPU, waiting for it is an error in here."""
        return no_waiting() if self.device.type == "cuda" else nullcontext()

    def nodes_agree(self, model: nn.Module) -> bool:
        """Whether every node has the same weights."""
        mine = b"".join(shard.cpu().numpy().tobytes() for shard in weights(model).values())
        return len(set(from_all_ranks(mine, self.mesh.get_group(0)))) == 1

    def dense(self) -> dict[str, Any]:
        """Stock HSDP beside ours, which sends exactly."""
        found = {}
        for name, policy in {"no policy": None, **HALF}.items():
            stock, ours = self.sharded(self.mesh, policy), self.sharded(self.mesh["shard"], policy)
            replication = ab.replicate(ours, self.mesh)
            losses = [self.train(stock, range(8)), self.train(ours, range(8))]
            one, other = weights(stock), weights(ours)
            found[name] = losses[0] == losses[1] and all(torch.equal(one[key], other[key]) for key in one)
            self.step_unwaited(ours)
            replication.close()
        return {"equal": found}

    def kind(self, name: str) -> dict[str, Any]:
        """Ours with a compressed exchange."""
        model = self.sharded(self.mesh["shard"])
        replication = ab.replicate(model, self.mesh, compress=KINDS[name])
        losses = self.train(model, range(30))
        self.step_unwaited(model)
        text = replication.explain()
        agree = self.nodes_agree(model)
        replication.close()
        return {"losses": losses, "agree": agree, "text": text}

    def watched(self, compress: str | None) -> dict[str, Any]:
        """Ours, or stock HSDP, beside a twin that nobody watches; steps wait for nothing."""
        models = [self.sharded(self.mesh["shard"] if compress else self.mesh) for _ in range(2)]
        replications = [ab.replicate(model, self.mesh, compress=compress) for model in models if compress]
        losses = [self.train(models[1], range(6))]
        watch, optimizer = ab.watch(models[0]), torch.optim.SGD(models[0].parameters(), lr=0.02)
        began = perf_counter()
        losses.append(self.train(models[0], range(6), optimizer))
        batch = torch.ones(BATCH, 7, device=self.device)
        with self.unwaited():
            for _ in range(4):
                batch_loss(models[0], batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        self.settle()
        wall_s = perf_counter() - began
        timeline, metrics, trace = watch.timeline(), watch.metrics(), watch.trace()
        text = watch.explain()
        watch.close()
        for replication in replications:
            replication.close()
        return {
            "losses": losses,
            "half_s": 5 * metrics["step_s"],  # of nine recorded steps, five took as long as the median or longer
            "wall_s": wall_s,
            "tracks": sorted({span.track for span in timeline.spans}),
            "spans": [[span.name, span.start_s, span.end_s] for span in timeline.spans],
            "positive": all(block.forward_s > 0 and block.backward_s > 0 for block in trace.blocks),
            "metrics": metrics,
            "text": text,
        }

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def units(self) -> dict[str, Any]:
        """Grouped units, some kept or gathered ahead, beside a unit per block; two ranks add in one order.

        Under mixed precision an older torch refuses those that are grouped.
        """
        plans = {
            "kept": ab.ShardingPlan.per_block(NAMES, reshard=False),
            "one": ab.ShardingPlan.from_cuts(NAMES, []),
            "ahead": ab.ShardingPlan(ab.ShardingPlan.from_cuts(NAMES, [2]).units, prefetch=2),
        }
        found, refused = dict[str, bool](), []
        policies: dict[str, dict[str, Any]] = {"": {}, "half ": {"mp_policy": HALF["float32"]}}
        for policy, options in policies.items():
            stock = ab.shard(self.whole(), self.mesh["shard"], **options)
            expected = self.train(stock, range(8)), weights(stock)
            for name, plan in plans.items():
                try:
                    model = ab.shard(self.whole(), self.mesh["shard"], plan, **options)
                except ab.PlanError as error:
                    refused.append([f"{policy}{name}", str(error)])
                    continue
                losses, own = self.train(model, range(8)), weights(model)
                same = all(torch.equal(own[key], expected[1][key]) for key in own)
                found[f"{policy}{name}"] = losses == expected[0] and same
        return {"equal": found, "refused": refused}

    def resume(self) -> dict[str, Any]:
        """A run that goes on from a checkpoint beside one that was not interrupted."""
        lasting = self.sharded(self.mesh["shard"])
        first = ab.replicate(lasting, self.mesh, compress="int4")
        self.train(lasting, range(4))
        path = str(self.folder / "checkpoint")
        save({"model": lasting.state_dict(), "comm": ab.ReplicationState(first)}, checkpoint_id=path)
        expected = self.train(lasting, range(4, 8))
        model = self.sharded(self.mesh["shard"])
        replication = ab.replicate(model, self.mesh, compress="int4")
        state = model.state_dict()
        load({"model": state, "comm": ab.ReplicationState(replication, path)}, checkpoint_id=path)
        found = self.train(model, range(4, 8))
        first.close()
        replication.close()
        return {"equal": found == expected, "losses": [expected, found]}

    def scaler(self) -> dict[str, Any]:
        """A loss scaler skips a step in which one rank's loss is not finite, on all ranks."""
        model = self.sharded(self.mesh["shard"])
        replication = ab.replicate(model, self.mesh, compress="int4")
        scaler = torch.amp.GradScaler(self.device.type, init_scale=256.0)
        replication.follow(scaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        scales = []
        for step in range(5):
            bad = step == 3 and dist.get_rank() == 1
            scaler.scale(batch_loss(model, self.batch(step)) * (float("inf") if bad else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        finite = all(bool(shard.isfinite().all()) for shard in weights(model).values())
        agree = self.nodes_agree(model)
        replication.close()
        return {"scales": scales, "finite": finite, "agree": agree}

    def found(self, mesh: DeviceMesh, compress: str | None) -> dict[str, Any]:
        """A search for units, and a model in those that it found."""
        batch = self.batch(0)
        found = ab.find_sharding(
            self.whole, mesh, lambda model: batch_loss(model, batch).backward(), compress=compress, rounds=1, steps=2
        )
        model = ab.shard(self.whole(), mesh if mesh.ndim == 1 else mesh["shard"], found.fastest)
        replication = ab.replicate(model, mesh, compress=compress) if compress else None
        losses = self.train(model, range(10))
        if replication is not None:
            replication.close()
        return {"losses": losses, "text": found.explain(), "blocks": list(found.default.names)}


def batch_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


# ------------------------------------------------------------------------------------------------------- the tests


Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What every rank found in every check, by its name."""
    folder = tmp_path_factory.mktemp("sharded")
    options = f"--hosts {NODES} --ranks-per-host {RANKS // NODES} --rate unshaped --backend nccl --timeout {LAB_S}"
    done = subprocess.run(
        [sys.executable, "-m", "anabranch", "lab", *options.split(), "--", sys.executable, __file__, str(folder)],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        },
        timeout=LAB_S + 30,
        check=False,
    )
    print(done.stdout)
    read: Found = {}
    for path in sorted(folder.glob("*-*.json")):
        read.setdefault(path.name.rpartition("-")[0], []).append(json.loads(path.read_text()))
    assert done.returncode == 0 or read, done.stderr
    read["lab"] = [{"code": done.returncode, "words": done.stderr}]
    return read


def ranks(found: Found, name: str) -> list[dict[str, Any]]:
    """What the ranks found in one check; fails if it failed on one of them."""
    results = found.get(name, [])
    for rank, result in enumerate(results):
        assert "error" not in result, f"rank {rank}: {result['error']}"
    assert len(results) == RANKS, f"{name} was not reached by all ranks: {found['lab']}"
    return results


pytestmark = ON_GPU


def test_exactly_sent_it_is_stock_hsdp_bit_by_bit(found: Found) -> None:
    for result in ranks(found, "dense"):
        assert result["equal"] == {"no policy": True, "float32": True, "bfloat16": True}


@pytest.mark.parametrize("kind", KINDS)
def test_compressed_kinds_train(found: Found, kind: str) -> None:
    for result in ranks(found, kind):
        assert result["agree"] and result["losses"][-1] < result["losses"][0] / 2
        assert f"{BLOCKS + 1} units between 2 nodes" in result["text"]


@pytest.mark.parametrize("name", ["watch", "watch_stock"])
def test_steps_are_timed_by_events_and_wait_for_nothing(found: Found, name: str) -> None:
    for result in ranks(found, name):
        assert result["losses"][0] == result["losses"][1] and result["positive"]
        assert result["tracks"] == ["between", "compute", "inside"]
        assert 0 < result["half_s"] <= result["wall_s"]
        spans = [span for span, _, _ in result["spans"]]
        for block in NAMES:
            assert [spans.count(f"{what} {block}") for what in ("gather", "reduce", "average")] == [2, 1, 1]
        assert all(end_s >= start_s for _, start_s, end_s in result["spans"])
        metrics = result["metrics"]
        assert 0 <= metrics["exposed_s"] <= metrics["inside_s"] + metrics["between_s"]


def test_grouped_units_are_a_unit_per_block_bit_by_bit(found: Found) -> None:
    for result in ranks(found, "units"):
        names = [f"{policy}{name}" for policy in ("", "half ") for name in ("kept", "one", "ahead")]
        refused = dict(result["refused"])
        assert set(refused) == (set(names[4:]) if no_groups_reason({"mp_policy": HALF["float32"]}) else set())
        assert all("casts to torch.bfloat16 only what the first block" in said for said in refused.values())
        assert result["equal"] == {name: True for name in names if name not in refused}


def test_a_run_resumes_bit_by_bit(found: Found) -> None:
    assert all(result["equal"] for result in ranks(found, "resume"))


def test_a_loss_scaler_skips_on_all_ranks(found: Found) -> None:
    for result in ranks(found, "scaler"):
        assert result["scales"] == [256.0, 256.0, 256.0, 128.0, 128.0] and result["finite"] and result["agree"]


@pytest.mark.parametrize("name", ["planned", "planned_nodes"])
def test_units_are_found(found: Found, name: str) -> None:
    for result in ranks(found, name):
        assert result["blocks"] == ["0", *NAMES] and result["losses"][-1] < result["losses"][0]


if __name__ == "__main__":
    Program(Path(sys.argv[1])).run()
