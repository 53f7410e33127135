"""The shards of a model that a rank holds: parameters and buffers by name, and the full tensors gathered from them.

Gradients, and optimizer state of a parameter's shape, are placed as the parameter is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.errors import UsageError
from unisono.graph.program.lowering import ShardedSpec
from unisono.mesh.gradient_norm import norm_of_shards, scale_to_norm
from unisono.mesh.mesh import Mesh
from unisono.mesh.optimizers import load_param_groups
from unisono.mesh.placement import Placements, Replicate, local_shape, local_slice, shard_dim
from unisono.mesh.reshard import move

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ParameterSpec:
    """The placement of a parameter or buffer: as one part, or as several (an unpacked one) that follow along `dim`."""

    parts: tuple[ShardedSpec, ...]
    dim: int = 0

    @property
    def placements(self) -> Placements:
        """Of all parts."""
        return self.parts[0].placements

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        if len(self.parts) > 1:
            shape[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return tuple(shape)

    def lengths(self, mesh: Mesh) -> list[int]:
        """Of the local parts along `dim`."""
        return [local_shape(part.shape, mesh, part.placements)[self.dim] for part in self.parts]


class ProgramShards:
    """What this rank holds. The full model is read once, tensor by tensor, when it is sharded."""

    def __init__(self, model: nn.Module, specs: Mapping[str, ParameterSpec], mesh: Mesh, device: torch.device) -> None:
        self.mesh = mesh
        self.specs = dict(specs)
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: Tensors = {}
        for name, parameter in model.named_parameters():
            shard = self.shard(name, parameter.detach()).to(device)
            self.parameters[name] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
        for name, buffer in model.named_buffers():
            self.buffers[name] = self.shard(name, buffer.detach()).to(device)
        self.optimized = dict(self.parameters)  # what the optimizer sees of each parameter, and its placement
        self.optimized_specs = dict(self.specs)

    def shard(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's own copy of its part of a full tensor that is placed as `name` is."""
        return self._shard(self.specs.get(name), full)

    def _shard(self, spec: ParameterSpec | None, full: torch.Tensor) -> torch.Tensor:
        if spec is None:
            return full.clone(memory_format=torch.contiguous_format)
        if len(spec.parts) == 1:
            return local_slice(full, self.mesh, spec.placements).clone(memory_format=torch.contiguous_format)
        parts = full.split([part.shape[spec.dim] for part in spec.parts], spec.dim)
        return torch.cat([local_slice(part, self.mesh, spec.placements) for part in parts], spec.dim)

    def full(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """The full tensor of which every rank has a part that is placed as `name` is. Every rank calls it."""
        return self._full(self.specs.get(name), local)

    def _full(self, spec: ParameterSpec | None, local: torch.Tensor) -> torch.Tensor:
        if spec is None:
            return local.detach().clone()
        if len(spec.parts) == 1:
            full = self._gathered(local.detach(), spec.parts[0])
            return full.clone() if full.data_ptr() == local.data_ptr() else full
        parts = local.detach().split(spec.lengths(self.mesh), spec.dim)
        return torch.cat([self._gathered(p, part) for p, part in zip(parts, spec.parts, strict=True)], spec.dim)

    def _gathered(self, local: torch.Tensor, spec: ShardedSpec) -> torch.Tensor:
        return move(local, self.mesh, spec.shape, spec.placements, (Replicate(),) * self.mesh.ndim)

    def is_sharded(self, name: str) -> bool:
        """Whether the optimizer sees a part of it."""
        spec = self.optimized_specs.get(name)
        return spec is not None and any(shard_dim(placement) is not None for placement in spec.placements)

    # ---- states ----------------------------------------------------------------------------------------------------

    def full_tensors(self) -> Tensors:
        return {name: self.full(name, tensor) for name, tensor in {**self.parameters, **self.buffers}.items()}

    @torch.no_grad()
    def load_tensors(self, full: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in {**self.parameters, **self.buffers}.items():
            if name not in full:
                raise UsageError(f"the state to load has no {name}; is it another model's?")
            shape = self.specs[name].shape if name in self.specs else tuple(tensor.shape)
            if tuple(full[name].shape) != shape:
                raise UsageError(f"{name} in the state to load is of shape {tuple(full[name].shape)}; expected {shape}")
            tensor.copy_(self.shard(name, full[name]))

    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """{"state": {name: {key: full tensor or value}}, "param_groups": [...]}, with names for parameters."""
        names = {id(parameter): name for name, parameter in self.optimized.items()}
        state = {
            name: {key: self._full_value(name, value) for key, value in optimizer.state.get(parameter, {}).items()}
            for name, parameter in self.optimized.items()
        }
        groups = [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def _full_value(self, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.ndim and value.shape == self.optimized[name].shape:
            return self._full(self.optimized_specs.get(name), value.contiguous())
        return value.detach().clone()

    @torch.no_grad()
    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        load_param_groups(optimizer, self.parameters, state)
        for name, parameter in self.optimized.items():
            values = {key: self._shard_of_value(name, value) for key, value in state["state"][name].items()}
            if values:
                optimizer.state[parameter] = values

    def _shard_of_value(self, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shape = self.specs[name].shape if name in self.specs else tuple(self.parameters[name].shape)
        if value.ndim and tuple(value.shape) == shape:
            return self._shard(self.optimized_specs.get(name), value).to(self.parameters[name].device)
        return value.clone()

    # ---- the norm --------------------------------------------------------------------------------------------------

    def gradient_norm(self) -> torch.Tensor:
        """The norm of all gradients of the full model, in float64. Every rank calls it."""
        counted = [each.grad for name, each in self.parameters.items() if each.grad is not None and self._counts(name)]
        return norm_of_shards(counted, self.mesh.comm())

    def _counts(self, name: str) -> bool:
        """Of the ranks that hold the same shard, the first along each axis counts it."""
        placements = self.specs[name].placements if name in self.specs else (Replicate(),) * self.mesh.ndim
        coordinate = self.mesh.coordinate()
        return all(shard_dim(p) is not None or coordinate[axis] == 0 for axis, p in enumerate(placements))

    def clip(self, largest: float) -> torch.Tensor:
        """Scale gradients so that their norm is at most `largest`, as torch.nn.utils.clip_grad_norm_ does."""
        norm = self.gradient_norm()
        scale_to_norm([each.grad.detach() for each in self.parameters.values() if each.grad is not None], norm, largest)
        return norm
