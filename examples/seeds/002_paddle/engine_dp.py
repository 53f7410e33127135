"""Section 2.2.4.3.1: the Engine, data parallel.

unisono run -n 2 examples/seeds/002_paddle/engine_dp.py
"""

from __future__ import annotations

import torch.nn.functional as F
from simple_net import Outcome, RandomDataset, SimpleNet, Size, main, momentum

import unisono as uni


def train(size: Size) -> Outcome:
    engine = uni.Engine(lambda: SimpleNet(size), F.cross_entropy, momentum, plan="dp=2")
    losses = []
    for batch in engine.dataloader(RandomDataset(size), size.batch_size, shuffle=False):
        loss = engine.run(batch)
        losses.append(loss.item())
    return Outcome(losses, engine.ready.state_dict()["model"], str(engine.plan))


if __name__ == "__main__":
    main(train)
