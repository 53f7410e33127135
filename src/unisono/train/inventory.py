"""The inventory of a trainer: every tensor of its state on this rank, by name, with its place in the whole.

model.<parameter or buffer>            what the optimizer has of a parameter, which may be more precise
optimizer.<parameter>.<key>            lies as the parameter does, or is common to all its holders (a count of steps)
extra....                              what the caller adds
random.<rank>.<device>                 torch's own generators, which are a rank's and not the job's
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from unisono.mesh.mesh import Mesh
from unisono.parallel.layout import Layout, layout_of
from unisono.parallel.optimizer_state import whole_shape
from unisono.parallel.trainer import Trainer
from unisono.train.chunks import Chunk, held_chunks, speaks, whole_chunk, written_chunks
from unisono.train.encoding import encoded

Shapes = dict[str, tuple[tuple[int, ...], str]]  # of a model: by name, the whole shape and the dtype


@dataclass(frozen=True)
class Entry:
    """A tensor, or this rank's piece of one."""

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]  # of the whole
    held: list[Chunk]
    written: list[Chunk]  # by this rank


@dataclass
class Inventory:
    entries: list[Entry] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)  # for JSON: what is no tensor

    @property
    def nbytes(self) -> int:
        """What this rank writes."""
        return sum(entry.tensor[chunk.slices].nbytes for entry in self.entries for chunk in entry.written)


def named_tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Parameters and buffers of this rank, by their names in the whole model."""
    model = trainer.model
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **dict(trainer.optimized())}


def shapes_here(trainer: Trainer) -> Shapes:
    """What of the model is on this rank, as one process would have it."""
    laid = named_tensors(trainer)
    own = {**dict(trainer.model.named_parameters()), **dict(trainer.model.named_buffers())}
    return {name: (tuple(whole_shape(laid[name])), dtype_name(own[name].dtype)) for name in own}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def passing_buffers(model: nn.Module) -> list[str]:
    """Buffers that the model makes by itself, and that its own state_dict leaves out."""
    return [
        f"{prefix}.{name}".strip(".")
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    ]


def collect(trainer: Trainer, extra: Any = None, *, weights_only: bool = False) -> Inventory:
    """All that this rank has to write; of `extra`, which is the same on all ranks, rank 0 writes all.

    weights_only: nothing but the model, for which any optimizer can go on.
    """
    return _Collector(trainer).collect(extra, weights_only)


class _Collector:
    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.mesh: Mesh = trainer.mesh
        self.made = Inventory()
        tied = trainer.tied
        self._laid: dict[str, tuple[tuple[int, ...], list[Chunk]]] = {}
        self.elsewhere = tied.elsewhere if tied is not None else frozenset()

    def collect(self, extra: Any, weights_only: bool) -> Inventory:
        for name, tensor in named_tensors(self.trainer).items():
            self._add_laid(f"model.{name}", tensor, name, tensor)
        optimized = {} if weights_only else dict(self.trainer.optimized())
        states = {name: self._state(name, tensor) for name, tensor in optimized.items()}
        names = {id(tensor): name for name, tensor in optimized.items()}
        self.made.told = {
            "model": shapes_here(self.trainer),
            "passing": passing_buffers(self.trainer.model),
            "optimizer": {
                "kind": type(self.trainer.optimizer).__qualname__,
                "state": {name: state for name, state in states.items() if state is not None},
                "groups": [self._group(number, names) for number in range(len(self.trainer.optimizer.param_groups))],
            },
        }
        if not weights_only:
            self._add_random()
        self.made.told["extra"] = self._encoded(extra, "extra", is_writer=self._is_first)
        self.made.told["trainer"] = {
            "steps": self.trainer.steps,
            "skipped": self.trainer.skipped,
            "scaler": None if self.trainer.scaler is None else self.trainer.scaler.state_dict(),
        }
        return self.made

    @property
    def _is_first(self) -> bool:
        return not any(self.mesh.coordinate())

    def _add_laid(self, entry: str, tensor: torch.Tensor, name: str, parameter: torch.Tensor) -> None:
        layout: Layout = layout_of(parameter)
        if name not in self._laid:
            shape = tuple(whole_shape(parameter))
            self._laid[name] = shape, held_chunks(shape, layout, self.mesh)
        shape, held = self._laid[name]
        written: list[Chunk] = []
        if name not in self.elsewhere:
            written = written_chunks(entry, held, tensor.element_size(), layout, self.mesh)
        self.made.entries.append(Entry(entry, tensor.detach(), shape, held, written))

    def _add_common(self, entry: str, tensor: torch.Tensor) -> None:
        chunk = whole_chunk(tensor.shape)
        chunks = [chunk] if tensor.numel() else []
        self.made.entries.append(Entry(entry, tensor, tuple(tensor.shape), chunks, chunks))

    def _encoded(self, value: Any, name: str, *, is_writer: bool) -> Any:
        """For JSON; all ranks look at it, so that what cannot be saved is refused on all of them alike."""
        tensors: dict[str, torch.Tensor] = {}
        told = encoded(value, name, tensors)
        for entry, tensor in tensors.items() if is_writer else ():
            self._add_common(entry, tensor)
        return told

    def _state(self, name: str, parameter: torch.Tensor) -> Any:
        """Optimizer state of a parameter for JSON, if it is this rank that tells it."""
        state = self.trainer.optimizer.state.get(parameter, {})
        is_speaker = name not in self.elsewhere and speaks(layout_of(parameter), self.mesh) and bool(state)
        told = {}
        for key, value in state.items():
            entry = f"optimizer.{name}.{key}"
            if lies_as(value, parameter):
                self._add_laid(entry, value, name, parameter)
                told[key] = {"laid": entry}
            else:
                told[key] = self._encoded(value, entry, is_writer=is_speaker)
        return told if is_speaker else None

    def _group(self, number: int, names: dict[int, str]) -> dict[str, Any]:
        group = self.trainer.optimizer.param_groups[number]
        told = {
            key: self._encoded(value, f"optimizer.group {number}.{key}", is_writer=self._is_first)
            for key, value in group.items()
            if key != "params"
        }
        return {"values": told, "params": [names[id(p)] for p in group["params"] if id(p) in names]}

    def _add_random(self) -> None:
        rank = self.mesh.index()
        self._add_common(f"random.{rank}.cpu", torch.get_rng_state())
        if torch.cuda.is_initialized():
            self._add_common(f"random.{rank}.cuda", torch.cuda.get_rng_state())


def lies_as(value: Any, parameter: torch.Tensor) -> bool:
    """Whether optimizer state is cut as its parameter is: it has its shape, and the parameter is no single number."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and parameter.ndim > 0
