"""Section 2.1.2: one device, forward, backward and update as one program.

python examples/seeds/002_paddle/single_static.py
"""

from __future__ import annotations

import torch.nn.functional as F
from simple_net import Outcome, SimpleNet, Size, batches, first, main, momentum

import unisono as uni


def train(size: Size) -> Outcome:
    mesh = uni.Mesh([1], ["dp"])
    program = uni.to_static(
        lambda: SimpleNet(size), mesh=mesh, loss=F.cross_entropy, optimizer=momentum, example=first(size)
    )
    losses = []
    for batch in batches(size):
        loss = program(batch)
        losses.append(loss.item())
    return Outcome(losses, program.state_dict()["model"], "program, one rank")


if __name__ == "__main__":
    main(train)
