"""DataParallel, step by step: one rank owns the model, the others compute for it.

Document 004, "DP".

unisono run -n 4 examples/seeds/004_overview/dp.py

The four steps that nn.DataParallel takes behind its wrapper, as messages, here between processes and so over any
number of hosts. Rank 0 has more work and more memory in use than the others, which is why DDP came after it. Printed:
the losses, and the worst deviation from one device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni

ROWS, STEPS = 16, 3


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 10, dtype=torch.float64, generator=generator), torch.ones(ROWS, 1, dtype=torch.float64)


def step(comm: uni.Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    owner = comm.rank == 0
    data, target = batch(number)
    optimizer.zero_grad()
    # 1. The owner's model is everywhere; its batch is dealt out.
    comm.broadcast_parameters(model, root=0)
    mine = comm.scatter(torch.empty_like(data.chunk(comm.size)[0]), data.chunk(comm.size) if owner else None)
    # 2. Every rank computes forward, and gives its outputs to the owner.
    outputs = model(mine)
    gathered = comm.gather(outputs.detach())
    # 3. The owner computes the loss on all outputs, and tells each rank the gradient of its own.
    gradient, loss = torch.empty_like(outputs), torch.zeros(())
    if owner:
        full = torch.cat(gathered).requires_grad_()
        loss = F.mse_loss(full, target)
        loss.backward()
    comm.scatter(gradient, full.grad.chunk(comm.size) if owner else None)
    # 4. Every rank computes backward; gradients are summed on the owner, who updates.
    outputs.backward(gradient)
    for parameter in model.parameters():
        comm.reduce(parameter.grad, root=0)
    if owner:
        optimizer.step()
    return loss.item()


def main() -> None:
    comm = uni.init()
    model, optimizer = made()
    losses = [step(comm, model, optimizer, number) for number in range(STEPS)]
    if comm.rank == 0:
        alone, stepping = made()
        for number in range(STEPS):
            stepping.zero_grad()
            F.mse_loss(alone(batch(number)[0]), batch(number)[1]).backward()
            stepping.step()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        deviation = max((mine - one).abs().max().item() for mine, one in pairs)
        print(f"losses {', '.join(f'{loss:.4f}' for loss in losses)}")
        print(f"worst deviation from one device: {deviation:.1e}")
        assert deviation < 1e-12
    uni.shutdown()


if __name__ == "__main__":
    main()
