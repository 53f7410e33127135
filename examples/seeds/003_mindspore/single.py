"""The document's network and training on one device.

python examples/seeds/003_mindspore/single.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from quickstart_net import EPOCHS, Net, dataset, momentum


def train() -> list[float]:
    torch.manual_seed(0)
    net = Net()
    optimizer = momentum(net.parameters())
    losses = []
    for epoch in range(1, EPOCHS + 1):
        for step, (inputs, labels) in enumerate(dataset(), 1):
            loss = F.mse_loss(net(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            print(f"epoch: {epoch} step: {step}, loss is {loss.item()}")
    return losses


if __name__ == "__main__":
    train()
