"""The pieces of a model that a rank holds: parameters and buffers by the model's names, their way to whole and back.

Gradients, and optimizer state of a parameter's shape, lie as the parameter does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.errors import UsageError
from unisono.graph.program.lowering import Laid
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placements, Replicate, local_shape, local_slice, shard_dim
from unisono.mesh.reshard import move

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Held:
    """How a parameter or buffer lies: whole in one part, or in several (an unpacked one) that follow along `dim`."""

    parts: tuple[Laid, ...]
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


class Pieces:
    """What this rank holds. The whole model is read once, tensor by tensor, when it is cut."""

    def __init__(self, model: nn.Module, laid: Mapping[str, Held], mesh: Mesh, device: torch.device) -> None:
        self.mesh = mesh
        self.laid = dict(laid)
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: Tensors = {}
        for name, parameter in model.named_parameters():
            piece = self.piece(name, parameter.detach()).to(device)
            self.parameters[name] = nn.Parameter(piece, requires_grad=parameter.requires_grad)
        for name, buffer in model.named_buffers():
            self.buffers[name] = self.piece(name, buffer.detach()).to(device)
        self.optimized = dict(self.parameters)  # what the optimizer sees of each parameter, and how that lies
        self.optimized_laid = dict(self.laid)

    def piece(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's own copy of its part of a whole tensor that lies as `name` does."""
        return self._piece(self.laid.get(name), whole)

    def _piece(self, laid: Held | None, whole: torch.Tensor) -> torch.Tensor:
        if laid is None:
            return whole.clone(memory_format=torch.contiguous_format)
        if len(laid.parts) == 1:
            return local_slice(whole, self.mesh, laid.placements).clone(memory_format=torch.contiguous_format)
        parts = whole.split([part.shape[laid.dim] for part in laid.parts], laid.dim)
        return torch.cat([local_slice(part, self.mesh, laid.placements) for part in parts], laid.dim)

    def whole(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """The whole of which every rank has a part that lies as `name` does. Every rank calls it."""
        return self._whole(self.laid.get(name), local)

    def _whole(self, laid: Held | None, local: torch.Tensor) -> torch.Tensor:
        if laid is None:
            return local.detach().clone()
        if len(laid.parts) == 1:
            whole = self._gathered(local.detach(), laid.parts[0])
            return whole.clone() if whole.data_ptr() == local.data_ptr() else whole
        parts = local.detach().split(laid.lengths(self.mesh), laid.dim)
        return torch.cat([self._gathered(p, part) for p, part in zip(parts, laid.parts, strict=True)], laid.dim)

    def _gathered(self, local: torch.Tensor, laid: Laid) -> torch.Tensor:
        return move(local, self.mesh, laid.shape, laid.placements, (Replicate(),) * self.mesh.ndim)

    def is_cut(self, name: str) -> bool:
        """Whether the optimizer sees a part of it."""
        laid = self.optimized_laid.get(name)
        return laid is not None and any(shard_dim(placement) is not None for placement in laid.placements)

    # ---- states ----------------------------------------------------------------------------------------------------

    def whole_tensors(self) -> Tensors:
        return {name: self.whole(name, tensor) for name, tensor in {**self.parameters, **self.buffers}.items()}

    @torch.no_grad()
    def load_tensors(self, whole: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in {**self.parameters, **self.buffers}.items():
            if name not in whole:
                raise UsageError(f"the state to load has no {name}; is it another model's?")
            shape = self.laid[name].shape if name in self.laid else tuple(tensor.shape)
            if tuple(whole[name].shape) != shape:
                raise UsageError(
                    f"{name} in the state to load is of shape {tuple(whole[name].shape)}; expected {shape}"
                )
            tensor.copy_(self.piece(name, whole[name]))

    def whole_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """{"state": {name: {key: whole tensor or value}}, "param_groups": [...]}, with names for parameters."""
        names = {id(parameter): name for name, parameter in self.optimized.items()}
        state = {
            name: {key: self._whole_value(name, value) for key, value in optimizer.state.get(parameter, {}).items()}
            for name, parameter in self.optimized.items()
        }
        groups = [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def _whole_value(self, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.ndim and value.shape == self.optimized[name].shape:
            return self._whole(self.optimized_laid.get(name), value.contiguous())
        return value.detach().clone()

    @torch.no_grad()
    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        unknown = sorted(set(self.parameters) - set(state["state"]))
        if unknown:
            raise UsageError(f"the optimizer state to load has nothing for {unknown[0]}; is it another model's?")
        if len(state["param_groups"]) != len(optimizer.param_groups):
            raise UsageError(
                f"the optimizer state to load has {len(state['param_groups'])} parameter groups, "
                f"but the optimizer {len(optimizer.param_groups)}"
            )
        for group, loaded in zip(optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
        for name, parameter in self.optimized.items():
            values = {key: self._piece_of_value(name, value) for key, value in state["state"][name].items()}
            if values:
                optimizer.state[parameter] = values

    def _piece_of_value(self, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shape = self.laid[name].shape if name in self.laid else tuple(self.parameters[name].shape)
        if value.ndim and tuple(value.shape) == shape:
            return self._piece(self.optimized_laid.get(name), value).to(self.parameters[name].device)
        return value.clone()

    # ---- the norm --------------------------------------------------------------------------------------------------

    def gradient_norm(self) -> torch.Tensor:
        """The norm of all gradients of the whole model, in float64. Every rank calls it."""
        squares = [
            torch.linalg.vector_norm(parameter.grad).double().square()
            for name, parameter in self.parameters.items()
            if parameter.grad is not None and parameter.grad.numel() and self._counts(name)
        ]
        comm = self.mesh.comm()
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        total = total.to(comm.device)
        return (comm.all_reduce(total) if comm.size > 1 else total).sqrt()

    def _counts(self, name: str) -> bool:
        """Of the ranks that hold the same piece, the first along each axis counts it."""
        placements = self.laid[name].placements if name in self.laid else (Replicate(),) * self.mesh.ndim
        place = self.mesh.coordinate()
        return all(shard_dim(p) is not None or place[axis] == 0 for axis, p in enumerate(placements))

    def clip(self, largest: float) -> torch.Tensor:
        """Scale gradients so that their norm is at most `largest`, as torch.nn.utils.clip_grad_norm_ does."""
        norm = self.gradient_norm()
        factor = (largest / (norm + 1e-6)).clamp(max=1.0)
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.detach().mul_(factor.to(parameter.grad.device, parameter.grad.dtype))
        return norm
