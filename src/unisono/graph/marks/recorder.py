"""The recorder: marks that a model makes while it is traced, on their way into the graph as ops of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.graph.marks.spec import PendingMark, PlacementSpec, add_spec


class MarkRecorder:
    """The notes of one trace, by their number in the graph's marker ops."""

    def __init__(self, model: nn.Module, binding: bool = True) -> None:
        """binding: whether marks count; where not, they are ignored."""
        self.binding = binding
        self.notes: list[PendingMark] = []
        self.placement_specs: dict[str, PlacementSpec] = {}  # for parameters, made while the model ran
        self.stages: dict[str, PlacementSpec] = {}  # for modules that begin a stage
        self.called: set[int] = set()
        self._model = model
        self._ops = 0

    def __enter__(self) -> MarkRecorder:
        _recorders.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _recorders.remove(self)

    def is_parameter(self, tensor: torch.Tensor, placement_spec: PlacementSpec) -> bool:
        """A mark on a parameter holds for the parameter, whether or not the model uses what the mark returned."""
        name = next((name for name, parameter in self._model.named_parameters() if parameter is tensor), None)
        if name is not None:
            add_spec(self.placement_specs, name, placement_spec)
        return name is not None

    def note_stage(self, module: Any, placement_spec: PlacementSpec) -> None:
        name = next((name for name, known in self._model.named_modules() if known is module), None)
        if name is None:
            raise UsageError(f"a stage is marked at {placement_spec.line} with a module that is none of the model's")
        self.stages[name] = placement_spec

    def next_op(self) -> int:
        self._ops += 1
        return self._ops


_recorders: list[MarkRecorder] = []


def recorder() -> MarkRecorder | None:
    """Of the model that is being traced now."""
    return _recorders[-1] if _recorders else None


@torch.library.custom_op("unisono::mark", mutates_args=())
def _mark_op(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return tensor.clone()


@_mark_op.register_fake
def _(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(tensor)


MARKER = torch.ops.unisono.mark.default


def noted(tensor: torch.Tensor, note: PendingMark) -> torch.Tensor:
    recording = recorder()
    assert recording is not None
    if not recording.binding:
        return tensor
    recording.notes.append(note)
    return MARKER(tensor, len(recording.notes) - 1)
