"""Section 2.2.4.2.2: model parallel by marks.

unisono run -n 2 examples/seeds/002_paddle/semi_mp.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from simple_net import Outcome, SimpleNet, Size, batches, first, main, momentum

import unisono as uni


def train(size: Size) -> Outcome:
    mesh = uni.Mesh([2], ["mp"])
    torch.manual_seed(0)
    model = SimpleNet(size)
    uni.mark(model, "linear1.weight", mesh, [uni.Shard(0)])  # torch keeps weights as (outputs, inputs)
    uni.mark(model, "linear1.bias", mesh, [uni.Shard(0)])
    uni.mark(model, "linear2.weight", mesh, [uni.Shard(1)])
    trainer = uni.apply_marks(model, mesh=mesh, loss=F.cross_entropy, optimizer=momentum, example=first(size))
    losses = []
    for batch in batches(size):
        loss = trainer.step(batch)
        losses.append(loss.item())
    return Outcome(losses, trainer.state_dict()["model"], str(trainer.plan))


if __name__ == "__main__":
    main(train)
