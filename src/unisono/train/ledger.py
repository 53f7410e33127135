"""The ledger of a rank: what it held and said during one step of a run, for the report.

One step, early in the run, is watched: the activations that autograd keeps, the bytes of each kind of collective, and
when each action of a pipeline ran. What it costs, it costs that step only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from unisono.comm import traffic
from unisono.parallel.trainer import Trainer
from unisono.plan.action import Action


class Ledger:
    """Watch one step with `watching`; afterwards `held` tells."""

    def __init__(self) -> None:
        self._kept = Kept()
        self._spans: list[tuple[str, int, int, float, float]] = []
        self._said: traffic.Traffic | None = None
        self._began = self._ended = 0.0

    @property
    def is_written(self) -> bool:
        return self._said is not None

    @contextlib.contextmanager
    def watching(self, trainer: Trainer) -> Iterator[None]:
        """The step that runs in the block is the one that is told of."""

        def note(action: Action, start: float, end: float) -> None:
            self._spans.append((action.kind, action.stage, action.microbatch, start, end))

        own = {
            tensor.untyped_storage().data_ptr() for tensor in (*trainer.model.parameters(), *trainer.model.buffers())
        }
        self._kept.ignored = own
        trainer.on_action = note
        self._began = time.time()
        try:
            with traffic.counted() as said, torch.autograd.graph.saved_tensors_hooks(self._kept.pack, Kept.unpack):
                yield
            self._said = said
        finally:
            self._ended = time.time()
            trainer.on_action = None

    def held(self, trainer: Trainer) -> dict[str, Any]:
        """Bytes by kind, bytes said by kind of collective, spans of the pipeline: as JSON."""
        said = self._said or traffic.Traffic()
        return {
            "coordinate": dict(zip(trainer.mesh.names, map(int, trainer.mesh.coordinate()), strict=True)),
            "memory": memory_by_kind(trainer) | {"activations": self._kept.most},
            "collectives": {
                op: {"calls": said.calls[op], "payload": said.payload[op], "sent": said.sent_by[op]}
                for op in said.calls
            },
            "step": {"began": self._began, "ended": self._ended},
            "spans": self._spans,
        }


class Kept:
    """Bytes that autograd keeps for the backward, now and at most; a tensor kept twice counts once."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self.ignored: set[int] = set()
        self._holders: dict[int, int] = {}

    def pack(self, tensor: torch.Tensor) -> Holder:
        pointer, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if pointer in self.ignored:
            return Holder(None, 0, 0, tensor)
        count = self._holders.get(pointer, 0)
        self._holders[pointer] = count + 1
        if not count:
            self.now += size
            self.most = max(self.most, self.now)
        return Holder(self, pointer, size, tensor)

    @staticmethod
    def unpack(holder: Holder) -> torch.Tensor:
        return holder.tensor

    def let_go(self, pointer: int, size: int) -> None:
        self._holders[pointer] -= 1
        if not self._holders[pointer]:
            del self._holders[pointer]
            self.now -= size


class Holder:
    """What autograd keeps instead of a tensor; gone when autograd lets go of it."""

    __slots__ = ("_kept", "_pointer", "_size", "tensor")

    def __init__(self, kept: Kept | None, pointer: int, size: int, tensor: torch.Tensor) -> None:
        self._kept, self._pointer, self._size, self.tensor = kept, pointer, size, tensor

    def __del__(self) -> None:
        if self._kept is not None:
            self._kept.let_go(self._pointer, self._size)


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
    """Of the tensors' memory, each piece once."""
    pieces = {(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()) for tensor in tensors}
    return sum(size for pointer, size in pieces if pointer)
