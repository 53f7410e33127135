"""Section 2.2.4.2.1: data parallel by marks: an axis called dp shares the batch.

unisono run -n 2 examples/seeds/002_paddle/semi_dp.py
"""

from __future__ import annotations

import torch.nn.functional as F
from simple_net import Outcome, SimpleNet, Size, batches, first, main, momentum

import unisono as uni


def train(size: Size) -> Outcome:
    mesh = uni.Mesh([2], ["dp"])
    trainer = uni.apply_marks(
        lambda: SimpleNet(size), mesh=mesh, loss=F.cross_entropy, optimizer=momentum, example=first(size)
    )
    losses = []
    for batch in batches(size):
        loss = trainer.step(batch)
        losses.append(loss.item())
    return Outcome(losses, trainer.state_dict()["model"], str(trainer.plan))


if __name__ == "__main__":
    main(train)
