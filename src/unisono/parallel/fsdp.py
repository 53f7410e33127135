"""torch's own fully sharded data parallelism (FSDP2) in the place of ZeRO's third stage, made to sum.

For plans in which nothing but the batch is cut. Parameters become torch's DTensors: `parameter.full_tensor()` is the
whole, and optimizers, clipping and checkpoints are torch's own.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.parallel.layout import layout_of
from unisono.parallel.units import listed_units
from unisono.plan.plan import REPLICAS


def torch_fully_shard(model: nn.Module, mesh: Mesh, **options: Any) -> nn.Module:
    """Shard the model in place over the mesh's one axis of replicas; gradients are summed, not averaged."""
    axes = [axis for axis in REPLICAS if axis in mesh.names and mesh.size(axis) > 1]
    if len(axes) != 1:
        raise UsageError(f"torch's fully_shard takes one axis of replicas, but {mesh} has {axes or 'none'}; use Zero")
    for name, parameter in model.named_parameters():
        if layout_of(parameter).splits or layout_of(parameter).summed != REPLICAS:
            raise UsageError(f"{name} is cut, which torch's fully_shard knows nothing of; use Zero with stage=3")
        if not parameter.ndim:
            raise UsageError(f"{name} is a single number, which torch's fully_shard cannot cut; use Zero with stage=3")
    for module in (*listed_units(model), model):
        fully_shard(module, mesh=mesh[axes[0]].device_mesh, **options)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model
