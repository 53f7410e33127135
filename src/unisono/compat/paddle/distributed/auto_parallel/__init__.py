"""paddle.distributed.auto_parallel: marks, and the Engine that trains under the plan they make.

strategy     Strategy
engine       Engine
find_marks   the mesh of a forward's marks
"""

from __future__ import annotations

from unisono.compat.paddle.distributed.auto_parallel.engine import Engine as Engine
from unisono.compat.paddle.distributed.auto_parallel.strategy import Strategy as Strategy
from unisono.compat.paddle.distributed.mesh import ProcessMesh as ProcessMesh
from unisono.compat.paddle.distributed.mesh import reshard as reshard
from unisono.compat.paddle.distributed.mesh import shard_op as shard_op
from unisono.compat.paddle.distributed.mesh import shard_tensor as shard_tensor
from unisono.compat.paddle.paddle_names import missing_names

__getattr__ = missing_names(__name__)
