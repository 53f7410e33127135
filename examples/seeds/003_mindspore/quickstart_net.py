"""What the programs of this folder share: the document's data, its network without any marks, and its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

STEPS_PER_EPOCH, EPOCHS = 4, 5
BATCH = 16  # 2 samples for each of 8 ranks
IN_DIM, HIDDEN_DIM, OUT_DIM = 32, 16, 16
LEARNING_RATE, MOMENTUM = 0.2, 0.1

Batch = tuple[torch.Tensor, torch.Tensor]


def get_dataset(batch_size: int, in_dim: int, out_dim: int, steps_per_epoch: int) -> Callable[[], Iterator[Batch]]:
    """The document's: one batch of random numbers, again and again."""
    numbers = np.random.default_rng(1)
    input_data = torch.from_numpy(numbers.random((batch_size, in_dim), dtype=np.float32))
    label_data = torch.from_numpy(numbers.random((batch_size, out_dim), dtype=np.float32))

    def generate() -> Iterator[Batch]:
        for _ in range(steps_per_epoch):
            yield input_data, label_data

    return generate


dataset = get_dataset(BATCH, IN_DIM, OUT_DIM, STEPS_PER_EPOCH)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(IN_DIM, HIDDEN_DIM) * 0.01)
        self.weight2 = nn.Parameter(torch.randn(HIDDEN_DIM, OUT_DIM) * 0.01)
        self.matmul = torch.matmul
        self.relu = torch.relu
        self.matmul2 = torch.matmul

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.matmul(x, self.weight)
        out = self.relu(out)
        return self.matmul2(out, self.weight2)


def momentum(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)  # type: ignore[arg-type]
