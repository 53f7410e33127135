"""Section 2.2.4.3.4: the Engine, a pipeline; the loss is on every rank.

unisono run -n 2 examples/seeds/002_paddle/engine_pp.py
"""

from __future__ import annotations

import torch.nn.functional as F
from simple_net import Outcome, RandomDataset, SimpleNet, Size, main, momentum

import unisono as uni


def train(size: Size) -> Outcome:
    engine = uni.Engine(lambda: SimpleNet(size), F.cross_entropy, momentum, plan="pp=2,microbatches=2,boundaries=0+2")
    losses = []
    for batch in engine.dataloader(RandomDataset(size), size.batch_size, shuffle=False):
        loss = engine.run(batch)
        losses.append(loss.item())
    return Outcome(losses, engine.ready.state_dict()["model"], str(engine.plan))


if __name__ == "__main__":
    main(train)
