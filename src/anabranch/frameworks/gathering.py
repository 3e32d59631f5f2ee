"""The communication state of all ranks on rank 0, for frameworks whose checkpoint is one file that rank 0 writes."""

import json
from collections.abc import Mapping

import torch
import torch.distributed as dist

from anabranch.exchange.agree import from_all_ranks, wire_device


def gathered(entries: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> list[dict[str, torch.Tensor]]:
    """The entries of every rank, in rank order and in host memory, on rank 0; an empty list elsewhere. Collective.

    Names and shapes may differ between ranks. Tensors travel one by one, so that a GPU holds one more of them at most.
    """
    device, rank = wire_device(group), dist.get_rank(group)
    shapes = [[name, str(part.dtype).removeprefix("torch."), list(part.shape)] for name, part in entries.items()]
    headers = from_all_ranks(json.dumps(shapes).encode(), group)
    if rank != 0:
        for part in entries.values():
            dist.send(part.to(device).contiguous(), group_dst=0, group=group)
        return []
    states = [{name: part.cpu() for name, part in entries.items()}]
    for source, header in enumerate(headers[1:], start=1):
        states.append({})
        for name, dtype, shape in json.loads(header):
            part = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            dist.recv(part, group_src=source, group=group)
            states[source][name] = part.cpu()
    return states
