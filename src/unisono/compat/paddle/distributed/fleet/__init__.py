"""paddle.distributed.fleet: manual parallelism by a strategy.

strategy        DistributedStrategy
models          init, distributed_model, distributed_optimizer: the plan of a strategy, bound to a model
meta_parallel   layers that ranks share, PipelineLayer
"""

from __future__ import annotations

from unisono.compat.paddle.distributed import auto_parallel as auto
from unisono.compat.paddle.distributed.fleet import meta_parallel as meta_parallel
from unisono.compat.paddle.distributed.fleet.models import DataParallel as DataParallel
from unisono.compat.paddle.distributed.fleet.models import PipelineParallel as PipelineParallel
from unisono.compat.paddle.distributed.fleet.models import distributed_model as distributed_model
from unisono.compat.paddle.distributed.fleet.models import distributed_optimizer as distributed_optimizer
from unisono.compat.paddle.distributed.fleet.models import init as init
from unisono.compat.paddle.distributed.fleet.models import worker_index as worker_index
from unisono.compat.paddle.distributed.fleet.models import worker_num as worker_num
from unisono.compat.paddle.distributed.fleet.strategy import DistributedStrategy as DistributedStrategy
from unisono.compat.paddle.paddle_names import missing_names

auto = auto
__getattr__ = missing_names(__name__)
