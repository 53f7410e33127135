"""Section 2.2.4.2.5: data parallel by marks, as a program.

unisono run -n 2 examples/seeds/002_paddle/static_dp.py
"""

from __future__ import annotations

import torch.nn.functional as F
from simple_net import Outcome, SimpleNet, Size, batches, first, main, momentum

import unisono as uni


def train(size: Size) -> Outcome:
    mesh = uni.Mesh([2], ["dp"])
    program = uni.to_static(
        lambda: SimpleNet(size), mesh=mesh, loss=F.cross_entropy, optimizer=momentum, example=first(size)
    )
    losses = []
    for batch in batches(size):
        loss = program(batch)
        losses.append(loss.item())
    return Outcome(losses, program.state_dict()["model"], "program dp=2")


if __name__ == "__main__":
    main(train)
