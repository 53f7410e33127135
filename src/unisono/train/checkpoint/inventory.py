"""The inventory of a trainer: every tensor of its state on this rank, by name, with its chunks of the full tensor.

model.<parameter or buffer>            of a parameter the optimizer's copy, which may have higher precision
optimizer.<parameter>.<key>            sharded like the parameter, or common to all its holders (a step count)
extra....                              added by the caller; what is ByParameter is sharded like the parameters
random.<rank>.<device>                 torch's own generators of a rank

State that is no tensor is encoded as JSON (`encoded`, `decoded`): a manifest contains no pickle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.parallel.full_state import full_shape
from unisono.parallel.layout import Layout, layout_of
from unisono.parallel.precision import model_dtype
from unisono.parallel.trainer import Trainer
from unisono.train.checkpoint.chunks import Chunk, full_chunk, held_chunks, writes_metadata, written_chunks

Shapes = dict[str, tuple[tuple[int, ...], str]]  # of a model: by name, the full shape and the dtype


@dataclass(frozen=True)
class Entry:
    """A tensor, or this rank's shard of one."""

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]  # of the full tensor
    held: list[Chunk]
    written: list[Chunk]  # by this rank


@dataclass(frozen=True)
class ByParameter:
    """Tensors in `extra`, one for each parameter by its name, each sharded like its parameter."""

    tensors: dict[str, torch.Tensor]


@dataclass
class Inventory:
    entries: list[Entry] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)  # JSON: state that is no tensor

    @property
    def nbytes(self) -> int:
        """Bytes that this rank writes."""
        return sum(entry.tensor[chunk.slices].nbytes for entry in self.entries for chunk in entry.written)


def named_tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Parameters and buffers of this rank, by their names in the full model."""
    model = trainer.model
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **dict(trainer.optimized())}


def shapes_here(trainer: Trainer) -> Shapes:
    """Full shapes and dtypes of the parameters and buffers on this rank."""
    tensors = named_tensors(trainer)
    own = {**dict(trainer.model.named_parameters()), **dict(trainer.model.named_buffers())}
    return {name: (tuple(full_shape(tensors[name])), dtype_name(model_dtype(own[name]))) for name in own}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def nonpersistent_buffers(model: nn.Module) -> list[str]:
    """Buffers that are not in the model's state_dict."""
    return [
        f"{prefix}.{name}".strip(".")
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    ]


def collect(trainer: Trainer, extra: Any = None, *, weights_only: bool = False) -> Inventory:
    """All that this rank writes; `extra`, the same on all ranks, is written by rank 0.

    weights_only: only the model.
    """
    return _InventoryCollector(trainer).collect(extra, weights_only)


class _InventoryCollector:
    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.mesh: Mesh = trainer.mesh
        self.inventory = Inventory()
        tied = trainer.tied
        self._chunks: dict[str, tuple[tuple[int, ...], list[Chunk]]] = {}
        self.written_elsewhere = tied.elsewhere if tied is not None else frozenset()

    def collect(self, extra: Any, weights_only: bool) -> Inventory:
        for name, tensor in named_tensors(self.trainer).items():
            self._add_sharded(f"model.{name}", tensor, name, tensor)
        optimized = {} if weights_only else dict(self.trainer.optimized())
        states = {name: self._state(name, tensor) for name, tensor in optimized.items()}
        names = {id(tensor): name for name, tensor in optimized.items()}
        self.inventory.metadata = {
            "model": shapes_here(self.trainer),
            "passing": nonpersistent_buffers(self.trainer.model),
            "optimizer": {
                "kind": type(self.trainer.optimizer).__qualname__,
                "state": {name: state for name, state in states.items() if state is not None},
                "groups": [self._group(number, names) for number in range(len(self.trainer.optimizer.param_groups))],
            },
        }
        if not weights_only:
            self._add_random()
        self.inventory.metadata["extra"] = self._encoded(extra, "extra", is_writer=self._is_first)
        self.inventory.metadata["trainer"] = {
            "steps": self.trainer.steps,
            "skipped": self.trainer.skipped,
            "scaler": None if self.trainer.scaler is None else self.trainer.scaler.state_dict(),
        }
        return self.inventory

    @property
    def _is_first(self) -> bool:
        return not any(self.mesh.coordinate())

    def _add_sharded(self, entry: str, tensor: torch.Tensor, name: str, parameter: torch.Tensor) -> None:
        layout: Layout = layout_of(parameter)
        if name not in self._chunks:
            shape = tuple(full_shape(parameter))
            self._chunks[name] = shape, held_chunks(shape, layout, self.mesh)
        shape, held = self._chunks[name]
        written: list[Chunk] = []
        if name not in self.written_elsewhere:
            written = written_chunks(entry, held, tensor.element_size(), layout, self.mesh)
        self.inventory.entries.append(Entry(entry, tensor.detach(), shape, held, written))

    def _add_common(self, entry: str, tensor: torch.Tensor) -> None:
        chunk = full_chunk(tensor.shape)
        chunks = [chunk] if tensor.numel() else []
        self.inventory.entries.append(Entry(entry, tensor, tuple(tensor.shape), chunks, chunks))

    def _encoded(self, value: Any, name: str, *, is_writer: bool) -> Any:
        """As JSON; on all ranks, so that all of them refuse a value that cannot be saved."""
        tensors: dict[str, torch.Tensor] = {}
        sharded: dict[str, ByParameter] = {}
        json = encoded(value, name, tensors, sharded)
        for entry, tensor in tensors.items() if is_writer else ():
            self._add_common(entry, tensor)
        for entry, by_parameter in sharded.items():
            optimized = dict(self.trainer.optimized())
            for parameter, tensor in by_parameter.tensors.items():
                self._add_sharded(f"{entry}.{parameter}", tensor, parameter, optimized[parameter])
        return json

    def _state(self, name: str, parameter: torch.Tensor) -> Any:
        """Optimizer state of a parameter as JSON, if this rank writes it."""
        state = self.trainer.optimizer.state.get(parameter, {})
        is_ours = name not in self.written_elsewhere and writes_metadata(layout_of(parameter), self.mesh)
        is_writer_here = is_ours and bool(state)
        found = {}
        for key, value in state.items():
            entry = f"optimizer.{name}.{key}"
            if is_sharded_like(value, parameter):
                self._add_sharded(entry, value, name, parameter)
                found[key] = {"sharded_tensor": entry}
            else:
                found[key] = self._encoded(value, entry, is_writer=is_writer_here)
        return found if is_writer_here else None

    def _group(self, number: int, names: dict[int, str]) -> dict[str, Any]:
        group = self.trainer.optimizer.param_groups[number]
        values = {
            key: self._encoded(value, f"optimizer.group {number}.{key}", is_writer=self._is_first)
            for key, value in group.items()
            if key != "params"
        }
        return {"values": values, "params": [names[id(p)] for p in group["params"] if id(p) in names]}

    def _add_random(self) -> None:
        rank = self.mesh.index()
        self._add_common(f"random.{rank}.cpu", torch.get_rng_state())
        if torch.cuda.is_initialized():
            self._add_common(f"random.{rank}.cuda", torch.cuda.get_rng_state())


def is_sharded_like(value: Any, parameter: torch.Tensor) -> bool:
    """Whether optimizer state is sharded like its parameter: it has its shape, and the parameter is not 0-dim."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and parameter.ndim > 0


Tensors = dict[str, torch.Tensor]


def encoded(value: Any, name: str, tensors: Tensors, sharded: dict[str, ByParameter]) -> Any:
    """The value as JSON; its tensors are added to `tensors`, and those by parameter to `sharded`. For numbers, strings,
    None, lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, ByParameter):
        sharded[name] = value
        return {"by parameter": name}
    if isinstance(value, list):
        return [encoded(each, f"{name}.{number}", tensors, sharded) for number, each in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [encoded(each, f"{name}.{number}", tensors, sharded) for number, each in enumerate(value)]}
    if isinstance(value, dict):
        pairs = [[_key(key, name), encoded(each, f"{name}.{key}", tensors, sharded)] for key, each in value.items()]
        return {"dict": pairs}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a NumPy scalar
        return value.item()
    raise UsageError(
        f"{name} is of type {type(value).__name__}, which a checkpoint cannot contain; expected numbers, strings, "
        "tensors, None, and lists, tuples and dicts of them"
    )


def _key(key: Any, name: str) -> Any:
    if not isinstance(key, bool | int | float | str):
        raise UsageError(f"{name} has a key of type {type(key).__name__}; expected a string or a number")
    return key


def decoded(
    value: Any, tensor_of: Callable[[str], torch.Tensor], sharded_of: Callable[[str], ByParameter] | None = None
) -> Any:
    """The inverse of `encoded`; `tensor_of` returns the tensor of a name, `sharded_of` tensors by parameter."""
    if isinstance(value, list):
        return [decoded(each, tensor_of, sharded_of) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensor_of(content)
    if kind == "by parameter":
        assert sharded_of is not None
        return sharded_of(content)
    if kind == "tuple":
        return tuple(decoded(each, tensor_of, sharded_of) for each in content)
    return {key: decoded(each, tensor_of, sharded_of) for key, each in content}
