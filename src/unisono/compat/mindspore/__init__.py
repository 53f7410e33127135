"""MindSpore's documented names, thin, over unisono's own parts and torch.

    import unisono.compat.mindspore as ms                                   # was: import mindspore as ms
    from unisono.compat.mindspore.nn import Cell, Momentum, MSELoss         # was: from mindspore.nn import ...

A program changes its imports and nothing else. A Cell is torch's Module with `construct`; an op is an object with
`.shard(in_strategy)`, a mark of `uni.shard`; `Model.train` is `uni.to_static`.

context        set_context, set_auto_parallel_context, ParallelMode
communication  init, get_rank, get_group_size
common/        Tensor, Parameter, initializer, dtypes, set_seed
ops/           MatMul, ReLU, ... with .shard
nn/            Cell, layers, losses, optimizers
dataset/       GeneratorDataset, NumpySlicesDataset
train/         Model, callbacks, checkpoints
layout         from strategies to a mesh
ir             save_graphs
diagnosis      arguments in the wrong order
mindspore_names  names that are not here
"""

from __future__ import annotations

from unisono.compat.mindspore import common as common
from unisono.compat.mindspore import communication as communication
from unisono.compat.mindspore import context as context
from unisono.compat.mindspore import dataset as dataset
from unisono.compat.mindspore import nn as nn
from unisono.compat.mindspore import ops as ops
from unisono.compat.mindspore import train as train
from unisono.compat.mindspore.common import Parameter as Parameter
from unisono.compat.mindspore.common import ParameterTuple as ParameterTuple
from unisono.compat.mindspore.common import Tensor as Tensor
from unisono.compat.mindspore.common import dtype as dtype
from unisono.compat.mindspore.common import get_seed as get_seed
from unisono.compat.mindspore.common import set_seed as set_seed
from unisono.compat.mindspore.common.dtype import bfloat16 as bfloat16
from unisono.compat.mindspore.common.dtype import bool_ as bool_
from unisono.compat.mindspore.common.dtype import float16 as float16
from unisono.compat.mindspore.common.dtype import float32 as float32
from unisono.compat.mindspore.common.dtype import float64 as float64
from unisono.compat.mindspore.common.dtype import int8 as int8
from unisono.compat.mindspore.common.dtype import int16 as int16
from unisono.compat.mindspore.common.dtype import int32 as int32
from unisono.compat.mindspore.common.dtype import int64 as int64
from unisono.compat.mindspore.common.dtype import uint8 as uint8
from unisono.compat.mindspore.context import GRAPH_MODE as GRAPH_MODE
from unisono.compat.mindspore.context import PYNATIVE_MODE as PYNATIVE_MODE
from unisono.compat.mindspore.context import ParallelMode as ParallelMode
from unisono.compat.mindspore.context import get_auto_parallel_context as get_auto_parallel_context
from unisono.compat.mindspore.context import get_context as get_context
from unisono.compat.mindspore.context import reset_auto_parallel_context as reset_auto_parallel_context
from unisono.compat.mindspore.context import set_auto_parallel_context as set_auto_parallel_context
from unisono.compat.mindspore.context import set_context as set_context
from unisono.compat.mindspore.mindspore_names import missing_names, sentence
from unisono.compat.mindspore.train import Callback as Callback
from unisono.compat.mindspore.train import CheckpointConfig as CheckpointConfig
from unisono.compat.mindspore.train import LossMonitor as LossMonitor
from unisono.compat.mindspore.train import Model as Model
from unisono.compat.mindspore.train import ModelCheckpoint as ModelCheckpoint
from unisono.compat.mindspore.train import TimeMonitor as TimeMonitor
from unisono.compat.mindspore.train import load_checkpoint as load_checkpoint
from unisono.compat.mindspore.train import load_param_into_net as load_param_into_net
from unisono.compat.mindspore.train import save_checkpoint as save_checkpoint

__getattr__ = missing_names(__name__)


def explain_missing_module(name: str) -> str:
    """The sentence of `import mindspore.numpy`, where there is no such module (see launch/worker/aliases)."""
    return sentence(__name__, name.partition(".")[2], globals())
