"""paddle.distributed.

environment     ranks, groups, collectives; how a strategy divides the ranks
mesh            ProcessMesh, placements and marks
binding         what a layer, its backward and its optimizer do under a plan
fleet/          manual parallelism by a strategy
sharding        group_sharded_parallel
auto_parallel/  the Engine and its Strategy
static_model    to_static
"""

from __future__ import annotations

from unisono.compat.paddle.distributed import auto_parallel as auto_parallel
from unisono.compat.paddle.distributed import fleet as fleet
from unisono.compat.paddle.distributed import sharding as sharding
from unisono.compat.paddle.distributed.auto_parallel.strategy import Strategy as Strategy
from unisono.compat.paddle.distributed.environment import ReduceOp as ReduceOp
from unisono.compat.paddle.distributed.environment import all_gather as all_gather
from unisono.compat.paddle.distributed.environment import all_gather_object as all_gather_object
from unisono.compat.paddle.distributed.environment import all_reduce as all_reduce
from unisono.compat.paddle.distributed.environment import barrier as barrier
from unisono.compat.paddle.distributed.environment import broadcast as broadcast
from unisono.compat.paddle.distributed.environment import broadcast_object_list as broadcast_object_list
from unisono.compat.paddle.distributed.environment import get_rank as get_rank
from unisono.compat.paddle.distributed.environment import get_world_size as get_world_size
from unisono.compat.paddle.distributed.environment import init_parallel_env as init_parallel_env
from unisono.compat.paddle.distributed.environment import is_initialized as is_initialized
from unisono.compat.paddle.distributed.environment import new_group as new_group
from unisono.compat.paddle.distributed.mesh import Partial as Partial
from unisono.compat.paddle.distributed.mesh import ProcessMesh as ProcessMesh
from unisono.compat.paddle.distributed.mesh import Replicate as Replicate
from unisono.compat.paddle.distributed.mesh import Shard as Shard
from unisono.compat.paddle.distributed.mesh import dtensor_from_fn as dtensor_from_fn
from unisono.compat.paddle.distributed.mesh import reshard as reshard
from unisono.compat.paddle.distributed.mesh import shard_op as shard_op
from unisono.compat.paddle.distributed.mesh import shard_tensor as shard_tensor
from unisono.compat.paddle.distributed.static_model import DistModel as DistModel
from unisono.compat.paddle.distributed.static_model import to_static as to_static
from unisono.compat.paddle.paddle_names import missing_names

__getattr__ = missing_names(__name__)
