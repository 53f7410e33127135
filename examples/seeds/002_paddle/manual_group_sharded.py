"""Section 2.2.4.1.2: group sharded by hand; stage 1, 2, 3 is the document's level os, os_g, p_g_os.

unisono run -n 2 examples/seeds/002_paddle/manual_group_sharded.py
"""

from __future__ import annotations

import torch.nn.functional as F
from simple_net import Outcome, SimpleNet, Size, batches, main, momentum

import unisono as uni


def train(size: Size, stage: int) -> Outcome:
    plan = uni.Plan(dp=2, zero=stage)
    trainer = uni.parallelize(lambda: SimpleNet(size), plan, loss=F.cross_entropy, optimizer=momentum)
    losses = []
    for batch in batches(size):
        loss = trainer.step(batch)
        losses.append(loss.item())
    return Outcome(losses, trainer.state_dict()["model"], str(trainer.plan))


if __name__ == "__main__":
    main(train, stage=(1, 2, 3))
