"""Optimizers that would have to see more of a model than a plan gives a rank: they are refused (see
mesh/optimizers.py)."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.errors import UsageError
from unisono.mesh.optimizers import (
    BY_TENSOR,
    ELEMENTWISE,
    Make,
    OptimizerScope,
    optimizer_scope,
    require_elementwise_hooks,
    run_own_hooks_last,
)
from unisono.parallel.layout import layout_of

__all__ = [
    "BY_TENSOR",
    "ELEMENTWISE",
    "OptimizerScope",
    "optimizer_scope",
    "require_elementwise_hooks",
    "require_full_parameters",
    "run_own_hooks_last",
]


def require_full_parameters(optimizer: Optimizer, make: Make, model: nn.Module, *, is_sharded: bool) -> OptimizerScope:
    """Refuse an optimizer that would have to see more than a rank has; its reach.

    is_sharded: ranks will see different parameters, or shards of them, because of ZeRO or a pipeline.
    """
    name = type(optimizer).__name__
    sharded = [key for key, parameter in model.named_parameters() if layout_of(parameter).splits]
    if not sharded and not is_sharded:
        return OptimizerScope.MODEL
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError(
            "SparseAdam takes sparse gradients, which ranks do not sum; use Adam, and nn.Embedding(sparse=False)"
        )
    require_elementwise_hooks(optimizer)
    scope = optimizer_scope(optimizer, make)
    if scope is OptimizerScope.MODEL:
        where = f"{sharded[0]} is sharded" if sharded else "ZeRO or a pipeline gives every rank some of them only"
        raise UsageError(f"{name} looks at all parameters at once, but {where}; use zero=0, tp=1, pp=1, ep=1")
    if scope is OptimizerScope.TENSOR and sharded:
        raise UsageError(
            f"{name} uses a parameter as one tensor, but {sharded[0]} is sharded by tp or ep; use a plan without, or "
            "an optimizer that treats elements alone (if this one does, set is_elementwise = True on its class)"
        )
    return scope
