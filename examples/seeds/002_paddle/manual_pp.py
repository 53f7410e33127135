"""Section 2.2.4.1.4: a pipeline by hand, from a list of layers, two microbatches in the order of 1F1B.

unisono run -n 2 examples/seeds/002_paddle/manual_pp.py
"""

from __future__ import annotations

import torch.nn.functional as F
from simple_net import CLASSES, Outcome, Size, batches, first, main, momentum
from torch import nn

import unisono as uni


def simple_net(size: Size) -> list[uni.nn.LayerSpec]:
    return [
        uni.nn.LayerSpec(nn.Linear, 256, size.inner, dtype=size.dtype),
        uni.nn.LayerSpec(nn.Linear, size.inner, 256, dtype=size.dtype),
        uni.nn.LayerSpec(nn.Linear, 256, CLASSES, dtype=size.dtype),
        uni.nn.LayerSpec(nn.ReLU),
    ]


def train(size: Size) -> Outcome:
    plan = uni.Plan(pp=2, microbatches=2, schedule="1f1b", boundaries=(0, 2))
    trainer = uni.parallelize(simple_net(size), plan, loss=F.cross_entropy, optimizer=momentum, example=first(size))
    losses = []
    for batch in batches(size):
        loss = trainer.step(batch)
        losses.append(loss.item())
    state = trainer.state_dict()["model"]
    named = {f"linear{int(name[0]) + 1}{name[1:]}": tensor for name, tensor in state.items()}
    return Outcome(losses, named, str(trainer.plan))


if __name__ == "__main__":
    main(train)
