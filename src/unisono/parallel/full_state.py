"""A trainer's state as one process would have it: full tensors by name, so that any other plan can go on from it.

state = trainer.state_dict()          # every rank calls it, and has all of it
other.load_state_dict(state)          # of the same model, under any plan

Of the optimizer's state too: for a plain optimizer pass the model's named parameters; for ZeRO what it optimizes
(`zero.optimized()`). Their layouts describe them, and state tensors of their shape.

torch's own `model.state_dict()` and `optimizer.state_dict()` would have this rank's shards, under the names of full
tensors: `torch.save(model.state_dict(), ...)` on rank 0 would lose the others'. `refuse_partial_state` refuses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.mesh.optimizers import load_param_groups
from unisono.parallel.layout import full_tensors_of, layout_of, local_of
from unisono.parallel.master_weights import take_remainders

Tensors = dict[str, torch.Tensor]
Named = Iterable[tuple[str, torch.Tensor]]
_LIES = "as the parameter"


def full_tensors_in(model: nn.Module, optimized: Tensors, mesh: Mesh) -> Tensors:
    """Parameters (what the optimizer has of them, which may be more precise) and buffers, of all stages."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers()), **optimized}
    full_tensors = full_tensors_of(list(named.values()), [layout_of(tensor) for tensor in named.values()], mesh)
    mine = {name: tensor.clone() for name, tensor in zip(named, full_tensors, strict=True)}
    full: Tensors = {}
    for theirs in _over_stages(mine, mesh):
        full.update(theirs)
    return full


def refuse_partial_state(
    model: nn.Module, optimizer: Optimizer, optimized: Named, plan: str, is_pipeline: bool
) -> None:
    """Refuse state_dict() and load_state_dict() of a model and an optimizer of which this rank has a part.

    Args:
        model: what is left of the model on this rank.
        optimizer: what updates it.
        optimized: the tensors that it updates, by name.
        plan: named in the errors.
        is_pipeline: other ranks have other modules of the model.
    """
    state = "trainer.state_dict(), which every rank calls and which has all of it"
    get = f'use uni.export_weights(trainer, "model.safetensors") or {state}'
    take = "use uni.import_weights(trainer, ...) or trainer.load_state_dict(...), which every rank calls"
    if is_pipeline:
        model.register_state_dict_pre_hook(
            Refusal(f"plan {plan}: model.state_dict() would have the modules of this rank's stages only; {get}")
        )
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.shape != full_shape(parameter):
                named = f"{path}.{name}".removeprefix(".")
                shapes = f"{tuple(parameter.shape)} of {tuple(full_shape(parameter))}"
                module.register_state_dict_pre_hook(
                    Refusal(f"plan {plan}: model.state_dict() would have this rank's shard of {named}, {shapes}; {get}")
                )
                module.register_load_state_dict_pre_hook(_RefuseFull(f"plan {plan}: this rank has a shard of", take))
                break
    if is_pipeline or any(each.shape != full_shape(each) for _, each in optimized):
        what = "would have this rank's part of the optimizer's state"
        optimizer.register_state_dict_pre_hook(Refusal(f"plan {plan}: optimizer.state_dict() {what}; use {state}"))
        optimizer.register_load_state_dict_pre_hook(
            Refusal(f"plan {plan}: optimizer.load_state_dict() takes what this rank alone has; {take}")
        )


class Refusal:
    """A hook that raises a UsageError; unlike a function in a function, it can be copied with its model."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __call__(self, *_: Any) -> None:
        raise UsageError(self._message)


class _RefuseFull:
    """A hook of load_state_dict that refuses tensors of other shapes than this rank's shards."""

    def __init__(self, found: str, advice: str) -> None:
        self._found, self._advice = found, advice

    def __call__(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module._parameters.items():
            value = state.get(prefix + name)
            if parameter is not None and isinstance(value, torch.Tensor) and value.shape != parameter.shape:
                raise UsageError(
                    f"{self._found} {prefix}{name}, {tuple(parameter.shape)}, and model.load_state_dict() was given "
                    f"{tuple(value.shape)}; {self._advice}"
                )


@torch.no_grad()
def load_tensors(model: nn.Module, optimized: Tensors, mesh: Mesh, full: Tensors) -> None:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers()), **optimized}
    for name, tensor in named.items():
        if name not in full:
            raise UsageError(f"the state to load has no {name}; is it another model's?")
        if full[name].shape != full_shape(tensor):
            raise UsageError(
                f"{name} in the state to load is of shape {tuple(full[name].shape)}; expected "
                f"{tuple(full_shape(tensor))}"
            )
        tensor.copy_(local_of(full[name], layout_of(tensor), mesh))


def full_optimizer(optimizer: Optimizer, optimized: Tensors, mesh: Mesh) -> dict[str, Any]:
    """Optimizer state of all stages."""
    merged: dict[str, Any] = {"state": {}, "param_groups": []}
    for theirs in _over_stages(full_optimizer_state(optimizer, optimized.items(), mesh), mesh):
        merged["state"].update(theirs["state"])
        if not merged["param_groups"]:
            merged["param_groups"] = [{**group, "params": []} for group in theirs["param_groups"]]
        for group, more in zip(merged["param_groups"], theirs["param_groups"], strict=True):
            group["params"] += [name for name in more["params"] if name not in group["params"]]
    return merged


def _over_stages(mine: Any, mesh: Mesh) -> Iterable[Any]:
    return mesh.comm("pp").all_gather_object(mine) if mesh.size("pp") > 1 else [mine]


# ---- optimizers ----------------------------------------------------------------------------------------------------


def full_shape(tensor: torch.Tensor) -> torch.Size:
    """The shape of the full tensor of which this rank holds a shard."""
    shape = list(tensor.shape)
    for split in reversed(layout_of(tensor).splits):
        shape[split.dim] = split.length
    return torch.Size(shape)


def full_optimizer_state(optimizer: Optimizer, named: Named, mesh: Mesh) -> dict[str, Any]:
    """{"state": {name: {key: full tensor or value}}, "param_groups": [...]}. Every rank of the mesh calls it."""
    tensors = dict(named)
    names = {id(tensor): name for name, tensor in tensors.items()}
    groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]}
        for group in optimizer.param_groups
    ]
    return {"state": _full_states(optimizer, tensors, mesh), "param_groups": groups}


def _full_states(optimizer: Optimizer, tensors: dict[str, torch.Tensor], mesh: Mesh) -> dict[str, dict[str, Any]]:
    states = {name: optimizer.state.get(tensor, {}) for name, tensor in tensors.items()}
    full = {
        name: {
            key: value.detach().clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()
        }
        for name, state in states.items()
    }
    shards: dict[tuple[str, str], torch.Tensor] = {}
    for name, entries in _everyones(states, tensors, mesh).items():
        full[name] = entries
        for key, value in entries.items():
            if isinstance(value, tuple) and value[0] == _LIES:
                tensor = tensors[name]
                shards[name, key] = states[name].get(key, tensor.new_empty(tensor.shape, dtype=value[1]))
    gathered = full_tensors_of(list(shards.values()), [layout_of(tensors[name]) for name, _ in shards], mesh)
    for (name, key), tensor in zip(shards, gathered, strict=True):
        full[name][key] = tensor
    return full


def _everyones(
    states: dict[str, dict[str, Any]], tensors: dict[str, torch.Tensor], mesh: Mesh
) -> dict[str, dict[str, Any]]:
    """What any rank has for each parameter that is sharded: one that owns nothing of it may have no state for it."""
    groups: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for name, tensor in tensors.items():
        axes = tuple(_in_order(layout_of(tensor).axes, mesh))
        if axes:
            reported = {key: _reported(value, tensor) for key, value in states[name].items()}
            groups.setdefault(axes, {})[name] = reported
    found: dict[str, dict[str, Any]] = {}
    for axes, mine in groups.items():
        for theirs in mesh.comm(*axes).all_gather_object(mine):
            for name, entries in theirs.items():
                found[name] = entries | found.get(name, {})
    return {name: found[name] for name in tensors if name in found}


def _reported(value: Any, tensor: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return (_LIES, value.dtype) if value.shape == tensor.shape and tensor.ndim else value.detach().cpu()


def _in_order(axes: Iterable[str], mesh: Mesh) -> list[str]:
    return [name for name in mesh.names if name in set(axes)]


@torch.no_grad()
def load_full_state(
    optimizer: Optimizer, named: Named, mesh: Mesh, state: dict[str, Any], saved: Tensors | None = None
) -> None:
    """Put full state back, each rank keeping its shard; the plan may be another than the one that saved it.

    saved: the parameters that the state was saved with. Where the optimizer's have another precision now, state of
    their shape gets that, too.
    """
    tensors = dict(named)
    load_param_groups(optimizer, tensors, state)
    for name, tensor in tensors.items():
        shape = full_shape(tensor)
        has_changed = saved is not None and saved[name].dtype != tensor.dtype
        dtype = tensor.dtype if has_changed else None
        shards = {key: _shard(value, tensor, shape, mesh, dtype) for key, value in state["state"][name].items()}
        if shards:
            optimizer.state[tensor] = shards
    take_remainders(optimizer, tensors.values())


def _shard(value: Any, tensor: torch.Tensor, shape: torch.Size, mesh: Mesh, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == shape and shape:
        local = local_of(value, layout_of(tensor), mesh)
        dtype = dtype if local.is_floating_point() else None
        return local.to(tensor.device, dtype or local.dtype, copy=True).contiguous()
    return value.clone()
