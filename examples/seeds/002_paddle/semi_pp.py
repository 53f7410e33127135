"""Section 2.2.4.2.3: a pipeline by marks.

unisono run -n 2 examples/seeds/002_paddle/semi_pp.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from simple_net import Outcome, SimpleNet, Size, batches, first, main, momentum

import unisono as uni


def train(size: Size) -> Outcome:
    mesh = uni.Mesh([2], ["pp"])
    torch.manual_seed(0)
    model = SimpleNet(size)
    uni.mark(model, "linear1", mesh.at(pp=0))
    uni.mark(model, "linear3", mesh.at(pp=1))  # linear2 stays with linear1, relu goes with linear3
    trainer = uni.apply_marks(
        model, mesh=mesh, loss=F.cross_entropy, optimizer=momentum, example=first(size), microbatches=2
    )
    losses = []
    for batch in batches(size):
        loss = trainer.step(batch)
        losses.append(loss.item())
    return Outcome(losses, trainer.state_dict()["model"], str(trainer.plan))


if __name__ == "__main__":
    main(train)
