"""What a DDP's reducer holds, for tests."""

from torch.nn.parallel import DistributedDataParallel

from anabranch.ddp.reducer import BucketIndices


def layout_in_force(ddp: DistributedDataParallel) -> BucketIndices:
    """The buckets as the reducer holds them now; allocates them once more."""
    index = {parameter: i for i, parameter in enumerate(ddp._build_params_for_reducer()[0])}
    return [[index[p] for p in bucket.parameters()] for bucket in ddp.reducer._get_zeros_like_grad_buckets()]
