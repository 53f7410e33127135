"""Section 2.2.4.2.4: group sharded by marks, which the document leaves blank.

unisono run -n 2 examples/seeds/002_paddle/semi_group_sharded.py
"""

from __future__ import annotations

import torch.nn.functional as F
from simple_net import Outcome, SimpleNet, Size, batches, first, main, momentum

import unisono as uni


def train(size: Size, stage: int) -> Outcome:
    mesh = uni.Mesh([2], ["dp"])
    trainer = uni.apply_marks(
        lambda: SimpleNet(size), mesh=mesh, loss=F.cross_entropy, optimizer=momentum, example=first(size), zero=stage
    )
    losses = []
    for batch in batches(size):
        loss = trainer.step(batch)
        losses.append(loss.item())
    return Outcome(losses, trainer.state_dict()["model"], str(trainer.plan))


if __name__ == "__main__":
    main(train, stage=(1, 2, 3))
