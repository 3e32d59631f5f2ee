"""Train a character-level transformer that FSDP2 shards inside each node, with any exchange of gradients between nodes.

    torchrun --standalone --nproc-per-node 4 examples/sharded.py --nodes 2 --compress int8 --checkpoint run

On one machine "nodes" are halves of its ranks. With ``--compress none`` gradients are averaged exactly, as stock HSDP
does. The same command with more ``--steps`` goes on from the checkpoint, also on other numbers of nodes and ranks.
With ``--plan FILE`` units are those of the plan in that file; the first run finds it, by a trial, and writes it.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh

import anabranch as ab
from anabranch.tools.demo.text import CharTransformer, StandardLibrary


def main() -> None:
    """Train, and on rank 0 say how it went."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument(
        "--compress", default="int8", help="none, bf16, int8, int4, or a share such as 0.01 for Ok-Topk"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint", type=Path, help="save in this folder in the end, and go on from it")
    parser.add_argument("--plan", type=Path, help="units as in this file; found by a trial if it is not there")
    parser.add_argument("--losses", type=Path, help="write the losses to this file, as JSON")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device, (options.nodes, ranks // options.nodes), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(0)
    text, model = StandardLibrary(), CharTransformer().to(device)
    compress = compress_of(options.compress)
    plan = options.plan
    if plan and not everywhere(plan.exists(), device):  # nodes that share no folder find one in every run
        batch = text.batch(0, rank, ranks).to(device)
        found = ab.find_sharding(
            lambda: CharTransformer().to(device), mesh, lambda m: m(batch).backward(), compress=compress
        )
        if rank == 0:
            print(found.explain())
            ab.sharded.save(found.plan, options.plan, force=True)
        plan = found.plan
    ab.shard(model, mesh["shard"], plan)  # a unit per layer, or those of the plan
    replication = ab.replicate(model, mesh, compress=compress)  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    done = 0
    if options.checkpoint and options.checkpoint.exists():
        weights, state = get_state_dict(model, optimizer)
        counted, comm = torch.zeros(1, dtype=torch.int64), ab.ReplicationState(replication, options.checkpoint)
        entries = {"model": weights, "optimizer": state, "steps": counted, "comm": comm}
        load(entries, checkpoint_id=options.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        done = int(counted)

    if done >= options.steps:
        raise SystemExit(f"{options.checkpoint} has {done} steps: ask for more by --steps")
    losses: list[float] = []
    for step in range(done, options.steps):
        loss = model(text.batch(step, rank, ranks).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())

    if options.checkpoint:
        weights, state = get_state_dict(model, optimizer)
        entries = {"model": weights, "optimizer": state, "steps": torch.tensor([options.steps])}
        save({**entries, "comm": ab.ReplicationState(replication)}, checkpoint_id=options.checkpoint)
    if rank == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} after {options.steps} steps on {ranks} ranks")
        print(replication.explain())
        if options.losses:
            options.losses.write_text(json.dumps(losses))
    replication.close()
    dist.destroy_process_group()


def everywhere(here: bool, device: str) -> bool:
    """Whether this is so on all ranks: what they do together must not depend on what each finds."""
    flag = torch.tensor(int(here), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def compress_of(text: str) -> str | ab.OkTopk | None:
    """What ``replicate`` takes: nothing, a kind, or the largest values only."""
    if text == "none":
        return None
    return text if text[0].isalpha() else ab.OkTopk(density=float(text), warmup_steps=0, deterministic=True)


if __name__ == "__main__":
    main()
