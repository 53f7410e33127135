"""VQNet's distributed module."""

from __future__ import annotations

import numpy as np

from unisono.compat.vqnet import tensor as tensor
from unisono.compat.vqnet.distributed import ControlComm as ControlComm
from unisono.compat.vqnet.distributed import configs as configs
from unisono.compat.vqnet.distributed.ControlComm import CommController as CommController
from unisono.compat.vqnet.distributed.ControlComm import get_host_name as get_host_name
from unisono.compat.vqnet.distributed.ControlComm import get_local_rank as get_local_rank
from unisono.compat.vqnet.distributed.ControlComm import get_rank as get_rank
from unisono.compat.vqnet.distributed.ControlComm import get_world_size as get_world_size
from unisono.compat.vqnet.distributed.ControlComm import init_group as init_group
from unisono.compat.vqnet.distributed.datasplit import split_data as split_data
from unisono.compat.vqnet.distributed.pp import PipelineParallelTrainingWrapper as PipelineParallelTrainingWrapper
from unisono.compat.vqnet.distributed.qubits_reorder import DistQuantumLayerAdjoint as DistQuantumLayerAdjoint
from unisono.compat.vqnet.distributed.qubits_reorder import DistributeQMachine as DistributeQMachine
from unisono.compat.vqnet.distributed.tensor_parallel import ColumnParallelLinear as ColumnParallelLinear
from unisono.compat.vqnet.distributed.tensor_parallel import RowParallelLinear as RowParallelLinear
from unisono.compat.vqnet.distributed.zero import ZeroModelInitial as ZeroModelInitial
from unisono.compat.vqnet.vqnet_names import missing_names

# VQNet's own programs take `tensor` and `np` from `from pyvqnet.distributed import *`.
__all__ = [
    "ColumnParallelLinear",
    "CommController",
    "DistQuantumLayerAdjoint",
    "DistributeQMachine",
    "PipelineParallelTrainingWrapper",
    "RowParallelLinear",
    "ZeroModelInitial",
    "get_host_name",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_group",
    "np",
    "split_data",
    "tensor",
]

__getattr__ = missing_names(__name__)
