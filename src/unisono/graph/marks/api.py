"""Marks: how the user wants some tensors and ops placed on a mesh. The rest is inferred (see `propagate`).

    weight = uni.shard_tensor(weight, mesh, [uni.Replicate(), uni.Shard(1)])    # a tensor
    uni.mark(model, "layers.0.mlp.up.weight", mesh, [uni.Replicate(), uni.Shard(0)])
    uni.mark(model, "layers.6", mesh.at(pp=1))                                  # a stage: from here on, on those ranks
    matmul = uni.shard(torch.matmul, in_strategy=((2, 4), (4, 1)))              # an op: shards a dim, input by input
    y = uni.shard_op(torch.matmul, mesh, inputs=[[...], None], outputs=[[...]])(x, weight)
    y = uni.reshard(y, mesh, [uni.Shard(0), uni.Replicate()])                   # from here on

A mark counts in every trace of a model that runs into it; run without a trace, a marked function is the function. What
`shard` and `shard_op` return must be called: if it is dropped without, the next trace is an error. A module that is
called while a mark on one of its parameters has not counted yet, and ranks are running, warns.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from unisono.comm.rendezvous import world as worlds
from unisono.errors import UsageError
from unisono.graph.capture.source import calling_line
from unisono.graph.marks.recorder import noted, recorder
from unisono.graph.marks.spec import PendingMark, PlacementSpec, add_spec
from unisono.mesh import reshard as moves
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placement, checked

_tensors: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_modules: weakref.WeakKeyDictionary[nn.Module, dict[str, PlacementSpec]] = weakref.WeakKeyDictionary()
_stages: weakref.WeakKeyDictionary[nn.Module, dict[str, PlacementSpec]] = weakref.WeakKeyDictionary()
_unread: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameters whose marks nothing has acted on yet
_is_applied = 0  # how many blocks of `applied` are open
_warning: Any = None  # the hook that warns, while it is needed


@contextlib.contextmanager
def applied() -> Iterator[None]:
    """In the block a model runs under the plan that its marks made: those in its forward have nothing left to do."""
    global _is_applied
    _is_applied += 1
    try:
        yield
    finally:
        _is_applied -= 1


def _warn_if_called(tensor: torch.Tensor, placement_spec: PlacementSpec) -> None:
    """The mark of a parameter changes nothing by itself."""
    global _warning
    if isinstance(tensor, nn.Parameter) and worlds.is_initialized() and worlds.world().size > 1:
        _unread[tensor] = placement_spec
        if _warning is None:
            _warning = register_module_forward_pre_hook(_require_read)


def _require_read(module: nn.Module, args: Any) -> None:
    global _warning
    if not _is_applied and recorder() is None:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in _unread:
                warnings.warn(
                    f"{_unread[parameter]}: {name} of {type(module).__name__} is marked, but nothing has acted on the "
                    "mark, so this call computes with all of it on every rank; train with what uni.apply_marks or "
                    "uni.to_static gives, or replace it by what uni.shard_tensor returned",
                    RuntimeWarning,
                    stacklevel=4,
                )
                del _unread[parameter]
    if not len(_unread) and _warning is not None:
        _warning.remove()
        _warning = None


def shard_tensor(tensor: torch.Tensor, mesh: Mesh, placements: Sequence[Placement]) -> torch.Tensor:
    """The tensor, marked. Where the mesh's ranks are running, a DTensor of which each rank keeps its part.

    Args:
        tensor: A tensor.
        mesh: On which it is placed.
        placements: One for each axis of the mesh.
    """
    _require_tensor("shard_tensor", tensor)
    placement_spec = PlacementSpec(mesh, checked(placements, mesh, tensor.dim()), line=calling_line())
    recording = recorder()
    if recording is not None:
        return tensor if recording.is_parameter(tensor, placement_spec) else noted(tensor, PendingMark(placement_spec))
    if _is_applied:
        return tensor
    if not isinstance(tensor, DTensor):
        _tensors[tensor] = placement_spec
        _warn_if_called(tensor, placement_spec)
        tensor.untyped_storage()._unisono_placement_spec = (tensor.shape, placement_spec)  # type: ignore[attr-defined]
    if not worlds.is_initialized():
        return tensor
    return moves.shard_tensor(tensor, mesh, placements)


def mark_parameter(parameter: nn.Parameter, mesh: Mesh, placements: Sequence[Placement]) -> None:
    """The same mark for a parameter that stays as it is until a plan or a program is made of the marks."""
    _tensors[parameter] = PlacementSpec(mesh, checked(placements, mesh, parameter.dim()), line=calling_line())


def is_applied() -> bool:
    """Whether a model runs now under the plan that its marks made."""
    return _is_applied > 0


def reshard(tensor: torch.Tensor, mesh: Mesh, placements: Sequence[Placement]) -> torch.Tensor:
    """The tensor, redistributed; in a trace, a mark for all users of what is returned. Where no ranks are running, the
    full tensor is returned unchanged.

    Args:
        tensor: A tensor.
        mesh: On which it is placed.
        placements: One for each axis of the mesh.
    """
    _require_tensor("reshard", tensor)
    if recorder() is not None:
        return noted(
            tensor, PendingMark(PlacementSpec(mesh, checked(placements, mesh, tensor.dim()), line=calling_line()))
        )
    if _is_applied or not worlds.is_initialized():
        checked(placements, mesh, tensor.dim())
        return tensor
    return moves.reshard(tensor, mesh, placements)


def _require_tensor(word: str, given: object) -> None:
    if not isinstance(given, torch.Tensor):
        raise UsageError(f"{word}({given!r:.80}): expected a tensor; torch.as_tensor makes one of numbers")


def mark(module: nn.Module, name: str, mesh: Mesh, placements: Sequence[Placement] | None = None) -> None:
    """Marks a parameter, a buffer or a module by its name.

    Args:
        module: The model.
        name: Such as "layers.0.mlp.up.weight".
        mesh: On which it is placed.
        placements: One for each axis of the mesh. Without, `name` is a module: it and all that runs after it are on the
            ranks of `mesh`, such as mesh.at(pp=1).
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"mark({module!r}, {name!r}): expected an nn.Module, and a name in it")
    if placements is None:
        _mark_stage(module, name, mesh)
        return
    held = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    if name not in held:
        close = [known for known in held if known.rpartition(".")[2] == name.rpartition(".")[2]] or list(held)
        raise UsageError(
            f"the module has no parameter or buffer {name!r}; expected a name such as {', '.join(close[:5])}"
        )
    placement_spec = PlacementSpec(mesh, checked(placements, mesh, held[name].dim()), line=calling_line())
    marked = _modules.setdefault(module, {})
    add_spec(marked, name, placement_spec)
    _warn_if_called(held[name], placement_spec)


def _mark_stage(module: nn.Module, name: str, mesh: Mesh) -> None:
    names = [known for known, _ in module.named_modules() if known]
    if name in {known for known, _ in (*module.named_parameters(), *module.named_buffers())}:
        raise UsageError(f"{name} is marked without placements; give one an axis of the mesh")
    if name not in names:
        raise UsageError(
            f"the module has no module {name!r} to mark as a stage's first; its modules are {', '.join(names[:12])}"
            f"{', ...' if len(names) > 12 else ''} (a parameter's mark has placements)"
        )
    _stages.setdefault(module, {})[name] = PlacementSpec(mesh, line=calling_line())


def stages_for(model: nn.Module) -> dict[str, PlacementSpec]:
    """The modules that are marked as the first of a stage, by name; each placement spec has the mesh of the stage's
    ranks."""
    found: dict[str, PlacementSpec] = {}
    for prefix, module in model.named_modules():
        for name, placement_spec in _stages.get(module, {}).items():
            found[f"{prefix}.{name}".lstrip(".")] = placement_spec
    return found


def placement_specs_for(model: nn.Module) -> dict[str, PlacementSpec]:
    """What is marked among a model's parameters and buffers, by name. Who asks acts on it."""
    for parameter in model.parameters():
        _unread.pop(parameter, None)
    found: dict[str, PlacementSpec] = {}
    for listed in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in listed:
            if (placement_spec := placement_spec_of(tensor)) is not None:
                add_spec(found, name, placement_spec)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, placement_spec in _modules.get(module, {}).items():
            add_spec(found, f"{prefix}.{name}".lstrip("."), placement_spec)
    return found


def placement_spec_of(tensor: torch.Tensor) -> PlacementSpec | None:
    """How a tensor is marked, or already placed on a mesh."""
    if isinstance(tensor, DTensor):
        return PlacementSpec(Mesh.of(tensor.device_mesh), tuple(tensor.placements))
    return _tensors[tensor] if tensor in _tensors else _placement_spec_of_storage(tensor)


def _placement_spec_of_storage(tensor: torch.Tensor) -> PlacementSpec | None:
    """The mark of a tensor that a parameter was made from: nn.Parameter(uni.shard_tensor(values, ...)) has its memory,
    but is another tensor."""
    shape, placement_spec = getattr(tensor.untyped_storage(), "_unisono_placement_spec", (None, None))
    return placement_spec if shape == tensor.shape else None
