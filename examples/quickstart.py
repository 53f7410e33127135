"""The quickstart of sharding propagation: one marked matmul, and every other placement is inferred.

unisono explain examples/quickstart.py:quickstart --mesh dp=2,mp=4,full
unisono verify examples/quickstart.py:quickstart --program dp=2,mp=4,full
unisono run -n 8 examples/quickstart.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni


class Net(nn.Module):
    def __init__(self, inputs: int = 32, hidden: int = 16, outputs: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, hidden) * 0.01)
        self.weight2 = nn.Parameter(torch.randn(hidden, outputs) * 0.01)
        # x has 2 shards along dim 0 and 4 along dim 1, the weight has 4 along dim 0.
        self.matmul = uni.shard(torch.matmul, in_strategy=((2, 4), (4, 1)))
        self.relu = torch.relu
        self.matmul2 = torch.matmul

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.matmul(x, self.weight)
        out = self.relu(out)
        return self.matmul2(out, self.weight2)


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(16, 32, generator=generator), torch.rand(16, 16, generator=generator)


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.1)


quickstart = uni.Task(model=Net, loss=F.mse_loss, optimizer=_optimizer, batch=_batch, name="quickstart")


def main() -> None:
    comm = uni.init()
    mesh = uni.Mesh((2, comm.size // 2), ("dp", "mp"))
    program = uni.to_static(
        Net, example=_batch(0), mesh=mesh, loss=F.mse_loss, optimizer=_optimizer, fully_use_devices=True
    )
    if comm.rank == 0:
        print(program)
    for step in range(4):
        loss = program(_batch(step))
        if comm.rank == 0:
            print(f"step {step}: loss is {loss:.6f}")


if __name__ == "__main__":
    main()
