"""Section 2.2.4.1.1: data parallel by hand, that is, by a plan.

unisono run -n 2 examples/seeds/002_paddle/manual_dp.py
"""

from __future__ import annotations

import torch.nn.functional as F
from simple_net import Outcome, SimpleNet, Size, batches, main, momentum

import unisono as uni


def train(size: Size) -> Outcome:
    trainer = uni.parallelize(lambda: SimpleNet(size), "dp=2", loss=F.cross_entropy, optimizer=momentum)
    losses = []
    for batch in batches(size):
        loss = trainer.step(batch)
        losses.append(loss.item())
    return Outcome(losses, trainer.state_dict()["model"], str(trainer.plan))


if __name__ == "__main__":
    main(train)
