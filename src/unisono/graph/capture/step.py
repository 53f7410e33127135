"""What is traced: a model with its loss, as one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unisono.graph.capture.attributes import Attributes


class ModelWithLoss(nn.Module):
    """The model with its loss; `attributes` are looked at when they have run."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], torch.Tensor] | None) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self.training = model.training
        self.attributes = Attributes(model)

    def forward(self, inputs: tuple[tuple[Any, ...], dict[str, Any]], targets: Any) -> Any:
        outputs = self.model(*inputs[0], **inputs[1])
        made = outputs if self._loss is None else self._loss(outputs, targets)
        self.attributes.look()
        return made
