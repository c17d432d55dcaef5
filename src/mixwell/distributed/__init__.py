"""Rank, world size, collectives, DTensor and DDP helpers, sharded checkpoints, and the cost of communication.

With ``DistributedDataParallel`` every rank holds all parameters, and a gradient is that of its own rows until it
is averaged. With FSDP2 (``fully_shard``) every rank holds a shard of each parameter and of each averaged gradient.
"""

from mixwell.distributed.collectives import RankZeroError as RankZeroError
from mixwell.distributed.collectives import all_gather_array as all_gather_array
from mixwell.distributed.collectives import all_gather_object as all_gather_object
from mixwell.distributed.collectives import all_reduce_mean as all_reduce_mean
from mixwell.distributed.collectives import all_reduce_sum as all_reduce_sum
from mixwell.distributed.collectives import any_rank as any_rank
from mixwell.distributed.collectives import broadcast_tensors as broadcast_tensors
from mixwell.distributed.collectives import is_single_process as is_single_process
from mixwell.distributed.collectives import rank as rank
from mixwell.distributed.collectives import rank_zero_first as rank_zero_first
from mixwell.distributed.collectives import require_single_process as require_single_process
from mixwell.distributed.collectives import run_on_rank_zero as run_on_rank_zero
from mixwell.distributed.collectives import set_object_group as set_object_group
from mixwell.distributed.collectives import world_size as world_size
from mixwell.distributed.data_parallel import broadcast_buffers as broadcast_buffers
from mixwell.distributed.data_parallel import is_ddp as is_ddp
from mixwell.distributed.data_parallel import no_sync as no_sync
from mixwell.distributed.dtensor import distribute_like as distribute_like
from mixwell.distributed.dtensor import from_local as from_local
from mixwell.distributed.dtensor import full_tensor as full_tensor
from mixwell.distributed.dtensor import is_sharded as is_sharded
from mixwell.distributed.dtensor import replication_weight as replication_weight
from mixwell.distributed.dtensor import reshard as reshard
from mixwell.distributed.dtensor import to_local as to_local
