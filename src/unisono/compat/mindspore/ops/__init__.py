"""MindSpore's ops: objects that are made first, may be sharded, and are called in `construct`.

primitive   Primitive, with .shard(in_strategy)
operations  MatMul, ReLU, Add, ...
functional  the same as functions
"""

from __future__ import annotations

from unisono.compat.mindspore.mindspore_names import missing_names
from unisono.compat.mindspore.ops import operations as operations
from unisono.compat.mindspore.ops.functional import *  # noqa: F403
from unisono.compat.mindspore.ops.operations import *  # noqa: F403
from unisono.compat.mindspore.ops.primitive import Primitive as Primitive

__getattr__ = missing_names(__name__)
