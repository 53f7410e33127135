"""Section 2.2.4.1.3: model parallel by hand, from layers that ranks share; the loop is the ordinary one.

unisono run -n 2 examples/seeds/002_paddle/manual_mp.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from simple_net import CLASSES, Outcome, Size, batches, main, momentum
from torch import nn

import unisono as uni


class SimpleNet(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.linear1 = uni.nn.ColumnParallelLinear(256, size.inner, gather_output=False, dtype=size.dtype)
        self.linear2 = uni.nn.RowParallelLinear(size.inner, 256, input_is_parallel=True, dtype=size.dtype)
        self.linear3 = nn.Linear(256, CLASSES, dtype=size.dtype)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear1(x)
        x = self.linear2(x)
        x = self.linear3(x)
        return self.relu(x)


def train(size: Size) -> Outcome:
    comm = uni.world()
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
    return Outcome(losses, full(model, comm), f"{comm.size} ranks share linear1 and linear2")


def full(model: SimpleNet, comm: uni.Communicator) -> dict[str, torch.Tensor]:
    """All parameters, of which each rank has shards."""
    dims = {"linear1.weight": 0, "linear1.bias": 0, "linear2.weight": 1}
    state = model.state_dict()
    for name, dim in dims.items():
        state[name] = torch.cat(list(comm.all_gather(state[name])), dim)
    return state


if __name__ == "__main__":
    uni.init()
    main(train)
