"""What all programs of this folder share: the document's network, optimizer and data, and how results are shown.

The document's network is 256 -> 102400 -> 256 -> 10, 52 million parameters (`--full`); by default the inner width is
512. Data are random, but sample i is the same in every program.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import unisono as uni

BASE_LR, MOMENTUM, L2_DECAY = 0.1, 0.9, 1e-4
CLASSES = 10

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Size:
    inner: int = 512
    batches: int = 4
    batch_size: int = 32
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Outcome:
    """What training gave: the loss of every batch, and all parameters, whole, by name."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    plan: str = "one device"


class SimpleNet(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.linear1 = nn.Linear(256, size.inner, dtype=size.dtype)
        self.linear2 = nn.Linear(size.inner, 256, dtype=size.dtype)
        self.linear3 = nn.Linear(256, CLASSES, dtype=size.dtype)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear1(x)
        x = self.linear2(x)
        x = self.linear3(x)
        return self.relu(x)


class RandomDataset(Dataset[Batch]):
    def __init__(self, size: Size) -> None:
        self.size = size

    def __getitem__(self, number: int) -> Batch:
        generator = torch.Generator().manual_seed(number)
        image = torch.rand(256, generator=generator, dtype=self.size.dtype)
        return image, torch.randint(0, CLASSES - 1, (), generator=generator)

    def __len__(self) -> int:
        return self.size.batches * self.size.batch_size


def batches(size: Size) -> Iterator[Batch]:
    """The samples in order, in batches (image, label)."""
    dataset = RandomDataset(size)
    for start in range(0, len(dataset), size.batch_size):
        samples = [dataset[number] for number in range(start, start + size.batch_size)]
        yield torch.stack([image for image, _ in samples]), torch.stack([label for _, label in samples])


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=BASE_LR, momentum=MOMENTUM, weight_decay=L2_DECAY)


def first(size: Size) -> Batch:
    """An example, for what has to know shapes beforehand."""
    return next(batches(size))


def main(train: Callable[..., Outcome], **choices: tuple[int, ...]) -> None:
    """Train as the command line says, and show the losses. choices: further numbers that `train` takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true", help="the document's width, 102400")
    parser.add_argument("--batches", type=int, default=4)
    for name, values in choices.items():
        parser.add_argument(f"--{name}", type=int, choices=values, default=values[-1])
    chosen = vars(parser.parse_args())
    size = replace(Size(), inner=102400 if chosen.pop("full") else 512, batches=chosen.pop("batches"))
    outcome = train(size, **chosen)
    if not uni.is_initialized() or uni.rank() == 0:
        print(f"plan: {outcome.plan}")
        for number, loss in enumerate(outcome.losses):
            print(f"[batch {number}] loss: {loss:.5f}")
    if uni.is_initialized():
        uni.shutdown()
