"""Section 2.2.2: fully automatic (the third of the ways in 2.2.2): the plan is searched for.

unisono run -n 2 examples/seeds/002_paddle/engine_auto.py
"""

from __future__ import annotations

import torch.nn.functional as F
from simple_net import Outcome, RandomDataset, SimpleNet, Size, main, momentum

import unisono as uni


def train(size: Size) -> Outcome:
    engine = uni.Engine(lambda: SimpleNet(size), F.cross_entropy, momentum, plan="auto")
    losses = []
    for batch in engine.dataloader(RandomDataset(size), size.batch_size, shuffle=False):
        loss = engine.run(batch)
        losses.append(loss.item())
    return Outcome(losses, engine.ready.state_dict()["model"], str(engine.plan))


if __name__ == "__main__":
    main(train)
