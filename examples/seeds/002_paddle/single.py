"""Section 2.1.1: one device, the ordinary loop.

python examples/seeds/002_paddle/single.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from simple_net import Outcome, SimpleNet, Size, batches, main, momentum


def train(size: Size) -> Outcome:
    torch.manual_seed(0)
    model = SimpleNet(size)
    optimizer = momentum(model.parameters())
    losses = []
    for image, label in batches(size):
        out = model(image)
        loss = F.cross_entropy(out, label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Outcome(losses, model.state_dict())


if __name__ == "__main__":
    main(train)
