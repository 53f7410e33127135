"""StepProfile: memory and communication of a rank in one step of a run, for the report.

One early step is profiled: the activations that autograd saves, the bytes of each kind of collective, and the times of
each pipeline action. The overhead is limited to that step.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from unisono.comm import traffic
from unisono.parallel.trainer import Trainer
from unisono.plan.schedules.action import Action


class StepProfile:
    """Profile one step in `recording`; afterwards `as_json` returns the result."""

    def __init__(self) -> None:
        self._saved: SavedActivations | None = None
        self._spans: list[tuple[str, int, int, float, float]] = []
        self._traffic: traffic.Traffic | None = None
        self._began = self._ended = 0.0

    @property
    def is_recorded(self) -> bool:
        return self._traffic is not None

    @contextlib.contextmanager
    def recording(self, trainer: Trainer) -> Iterator[None]:
        """Profile the step that runs in the block."""

        def record(action: Action, start: float, end: float) -> None:
            self._spans.append((action.kind, action.stage, action.microbatch, start, end))

        saved = self._saved = SavedActivations(trainer.model)
        trainer.on_action = record
        self._began = time.time()
        try:
            with traffic.counted() as counted, torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
                yield
            self._traffic = counted
        finally:
            self._ended = time.time()
            trainer.on_action = None

    def as_json(self, trainer: Trainer) -> dict[str, Any]:
        """Memory by kind, traffic by kind of collective, spans of the pipeline."""
        counted = self._traffic or traffic.Traffic()
        return {
            "coordinate": dict(zip(trainer.mesh.names, map(int, trainer.mesh.coordinate()), strict=True)),
            "memory": memory_by_kind(trainer) | {"activations": self._saved.peak if self._saved else 0},
            "collectives": {
                op: {"calls": counted.calls[op], "payload": counted.payload[op], "sent": counted.sent_by[op]}
                for op in counted.calls
            },
            "step": {"began": self._began, "ended": self._ended},
            "spans": self._spans,
        }


class SavedActivations:
    """Bytes of the tensors that autograd saves for the backward, now and at the peak, without the model's own.

    Storages are distinguished by identity, not by address: ZeRO 3 frees the storage of a parameter while autograd still
    has a tensor in it, and an activation may then have the same address.
    """

    def __init__(self, model: nn.Module) -> None:
        self.now = 0
        self.peak = 0
        self._model = model
        self._saved: dict[int, int] = {}  # storages, each with the number of saved tensors in it

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        storage, size = _storage_of(tensor), tensor.untyped_storage().nbytes()
        own = itertools.chain(self._model.parameters(), self._model.buffers())
        if any(_storage_of(each) == storage for each in own):
            return SavedTensor(None, 0, 0, tensor)
        count = self._saved.get(storage, 0)
        self._saved[storage] = count + 1
        if not count:
            self.now += size
            self.peak = max(self.peak, self.now)
        return SavedTensor(self, storage, size, tensor)

    @staticmethod
    def unpack(saved: SavedTensor) -> torch.Tensor:
        return saved.tensor

    def release(self, storage: int, size: int) -> None:
        self._saved[storage] -= 1
        if not self._saved[storage]:
            del self._saved[storage]
            self.now -= size


class SavedTensor:
    """Stands for a tensor in autograd's graph; deleted when autograd no longer needs it."""

    __slots__ = ("_all", "_size", "_storage", "tensor")

    def __init__(self, all_saved: SavedActivations | None, storage: int, size: int, tensor: torch.Tensor) -> None:
        self._all, self._storage, self._size, self.tensor = all_saved, storage, size, tensor

    def __del__(self) -> None:
        if self._all is not None:
            self._all.release(self._storage, self._size)


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def memory_by_kind(trainer: Trainer) -> dict[str, int]:
    """Bytes of the state that this rank holds: parameters, gradients, optimizer state, buffers."""
    optimized = [tensor for _, tensor in trainer.optimized()]
    parameters = _bytes([*trainer.model.parameters(), *optimized])
    gradients = _bytes([tensor.grad for tensor in (*trainer.model.parameters(), *optimized) if tensor.grad is not None])
    states = [
        value
        for state in trainer.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": _bytes([value for value in states if isinstance(value, torch.Tensor)]),
        "buffers": _bytes(list(trainer.model.buffers())),
    }


def _bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the tensors' storages, each counted once."""
    storages = {(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()) for tensor in tensors}
    return sum(size for pointer, size in storages if pointer)
