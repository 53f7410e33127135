"""Paddle's documented names, thin, over unisono's own parts.

    unisono run --as paddle -n 2 program.py             # `import paddle` is this package, in the ranks only

tensor        Tensor (a torch tensor with Paddle's names) and functions of tensors
methods       methods of tensors that torch has with another meaning, or does not have
nn/           layers; a Linear's weight is (inputs, outputs)
optimizer     settings, of which a torch optimizer is made where it is known what it updates
io, metric    samplers and DataLoader; accuracy
saving        save and load
static/       programs that are recorded, and the Executor
base/         core.Graph and framework.IrGraph, which draw programs
distributed/  fleet, group_sharded_parallel, marks, to_static, the Engine: each becomes a plan of unisono's
paddle_names  the error for a name that is not here
"""

from __future__ import annotations

from typing import Any

import torch

from unisono.compat.paddle import base as base
from unisono.compat.paddle import distributed as distributed
from unisono.compat.paddle import io as io
from unisono.compat.paddle import metric as metric
from unisono.compat.paddle import nn as nn
from unisono.compat.paddle import optimizer as optimizer
from unisono.compat.paddle import regularizer as regularizer
from unisono.compat.paddle import static as static
from unisono.compat.paddle.distributed.fleet.models import DataParallel as DataParallel
from unisono.compat.paddle.nn.layers import ParamAttr as ParamAttr
from unisono.compat.paddle.paddle_names import explain, missing_names, paddle_name
from unisono.compat.paddle.saving import load as load
from unisono.compat.paddle.saving import save as save
from unisono.compat.paddle.static.program import disable_static as disable_static
from unisono.compat.paddle.static.program import enable_static as enable_static
from unisono.compat.paddle.static.program import in_dynamic_mode as in_dynamic_mode
from unisono.compat.paddle.tensor import Tensor as Tensor
from unisono.compat.paddle.tensor import add as add
from unisono.compat.paddle.tensor import arange as arange
from unisono.compat.paddle.tensor import argmax as argmax
from unisono.compat.paddle.tensor import cast as cast
from unisono.compat.paddle.tensor import concat as concat
from unisono.compat.paddle.tensor import flatten as flatten
from unisono.compat.paddle.tensor import full as full
from unisono.compat.paddle.tensor import get_default_dtype as get_default_dtype
from unisono.compat.paddle.tensor import matmul as matmul
from unisono.compat.paddle.tensor import mean as mean
from unisono.compat.paddle.tensor import no_grad as no_grad
from unisono.compat.paddle.tensor import ones as ones
from unisono.compat.paddle.tensor import rand as rand
from unisono.compat.paddle.tensor import randint as randint
from unisono.compat.paddle.tensor import randn as randn
from unisono.compat.paddle.tensor import reshape as reshape
from unisono.compat.paddle.tensor import seed as seed
from unisono.compat.paddle.tensor import set_default_dtype as set_default_dtype
from unisono.compat.paddle.tensor import squeeze as squeeze
from unisono.compat.paddle.tensor import stack as stack
from unisono.compat.paddle.tensor import sum as sum
from unisono.compat.paddle.tensor import to_tensor as to_tensor
from unisono.compat.paddle.tensor import transpose as transpose
from unisono.compat.paddle.tensor import unsqueeze as unsqueeze
from unisono.compat.paddle.tensor import zeros as zeros

float16, float32, float64, bfloat16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
int32, int64, bool = torch.int32, torch.int64, torch.bool


def explain_missing_module(name: str) -> str:
    """The sentence where `import paddle.name` finds nothing."""
    return explain(paddle_name(name), globals())


def set_device(device: Any) -> None:
    """Taken, and not needed: a rank has its own device."""


class CPUPlace:
    """Taken where Paddle takes a place, and not needed."""


class CUDAPlace:
    """Of a number; taken as CPUPlace is."""

    def __init__(self, id: int) -> None:
        self.id = id


__getattr__ = missing_names(__name__)
