"""Rank, world size, collectives, DTensor and DDP helpers, sharded checkpoints, and the cost of communication.

With ``DistributedDataParallel`` every rank holds all parameters, and a gradient is that of its own rows until it
is averaged. With FSDP2 (``fully_shard``) every rank holds a shard of each parameter and of each averaged gradient.
"""

from mixwell.distributed.collectives import (
    RankZeroError,
    all_gather_array,
    all_gather_object,
    all_reduce_mean,
    all_reduce_sum,
    any_rank,
    broadcast_tensors,
    is_single_process,
    rank,
    rank_zero_first,
    require_single_process,
    run_on_rank_zero,
    set_object_group,
    world_size,
)
from mixwell.distributed.data_parallel import broadcast_buffers, is_ddp, no_sync
from mixwell.distributed.dtensor import (
    distribute_like,
    from_local,
    full_tensor,
    is_sharded,
    replication_weight,
    reshard,
    to_local,
)

__all__ = [
    "RankZeroError",
    "all_gather_array",
    "all_gather_object",
    "all_reduce_mean",
    "all_reduce_sum",
    "any_rank",
    "broadcast_buffers",
    "broadcast_tensors",
    "distribute_like",
    "from_local",
    "full_tensor",
    "is_ddp",
    "is_sharded",
    "is_single_process",
    "no_sync",
    "rank",
    "rank_zero_first",
    "replication_weight",
    "require_single_process",
    "reshard",
    "run_on_rank_zero",
    "set_object_group",
    "to_local",
    "world_size",
]
