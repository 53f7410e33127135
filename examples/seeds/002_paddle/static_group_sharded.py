"""Section 2.2.4.2.8: group sharded as a program, which the document leaves blank.

unisono run -n 2 examples/seeds/002_paddle/static_group_sharded.py
"""

from __future__ import annotations

import torch.nn.functional as F
from simple_net import Outcome, SimpleNet, Size, batches, first, main, momentum

import unisono as uni


def train(size: Size, stage: int) -> Outcome:
    mesh = uni.Mesh([2], ["dp"])
    program = uni.to_static(
        lambda: SimpleNet(size), mesh=mesh, loss=F.cross_entropy, optimizer=momentum, example=first(size), zero=stage
    )
    losses = []
    for batch in batches(size):
        loss = program(batch)
        losses.append(loss.item())
    return Outcome(losses, program.state_dict()["model"], f"program dp=2,zero={stage}")


if __name__ == "__main__":
    main(train, stage=(1, 2, 3))
