"""What a rank does not hold of a model: parameters of other stages, put away so that the model still runs.

A stage runs the user's own forward, which reaches for the embedding even where the embedding is on another rank. So an
off-stage parameter is replaced by a placeholder, zeros of its shape in the memory of a single number, and is a
parameter no longer: it is not in named_parameters(), state_dict() or any optimizer. Off-stage buffers keep their
values, since masks and positions may be made of them on every rank, but are not reported either.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.parallel.pipeline.message import TensorForm

OFF_STAGE = "unisono_off_stage"  # on modules whose parameters are of another stage


def is_off_stage(module: nn.Module) -> bool:
    """Whether nobody needs what the module makes on this rank."""
    return getattr(module, OFF_STAGE, False)


class OffStage:
    """Takes what is not owned out of the model, in place."""

    def __init__(self, model: nn.Module, owned: Container[int]) -> None:
        """`owned` are the ids of the parameters and buffers that stay."""
        self.is_running = False  # a stage; the modules here cannot be called otherwise
        self._model = type(model).__name__
        self._meta: list[tuple[nn.Module, str]] = []
        self._buffers: list[tuple[nn.Module, str]] = []
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and id(parameter) not in owned:
                    del module._parameters[name]
                    setattr(module, name, TensorForm.of(parameter).placeholder(parameter.device))
                    setattr(module, OFF_STAGE, True)
                    self._meta.append((module, name))
            for name, buffer in list(module._buffers.items()):
                if buffer is not None and id(buffer) not in owned:
                    del module._buffers[name]
                    setattr(module, name, buffer)
                    self._buffers.append((module, name))
        for module in {module for module, _ in self._meta}:
            module.register_forward_pre_hook(self._require_stage, prepend=True)
        self._reference = next((p for p in model.parameters() if p.is_floating_point() or p.is_complex()), None)
        self._placement = _placement(self._reference)

    def _require_stage(self, module: nn.Module, args: Any) -> None:
        if not self.is_running:
            raise UsageError(
                f"{type(module).__name__} was called on a rank that holds a part of {self._model} only, as a pipeline "
                "does; use trainer.step, trainer.evaluate, trainer.predict or trainer.generate, which run every stage"
            )

    def parameters(self) -> Iterator[torch.Tensor]:
        """The placeholders."""
        for module, name in self._meta:
            yield getattr(module, name)

    def follow(self) -> None:
        """Move to where the model has moved, as model.to() and model.double() no longer reach what is put away."""
        reference, before = self._reference, self._placement
        if reference is None or before == _placement(reference):
            return
        for module, name in self._meta + self._buffers:
            tensor = getattr(module, name)
            dtype = _as_precise(tensor.dtype, reference.dtype) if _placement(tensor) == before else tensor.dtype
            if (module, name) in self._meta:
                moved = TensorForm(tuple(tensor.shape), dtype).placeholder(reference.device)
            else:
                moved = tensor.to(reference.device, dtype)
            setattr(module, name, moved)
        self._placement = _placement(reference)


def _placement(tensor: torch.Tensor | None) -> tuple[torch.device, torch.dtype] | None:
    """The device, and the dtype of real numbers or of the parts of complex ones."""
    return None if tensor is None else (tensor.device, tensor.dtype.to_real())


def _as_precise(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Real or complex as the one dtype, with the precision of the other."""
    return other.to_complex() if dtype.is_complex else other.to_real()
