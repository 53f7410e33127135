"""A GAN in a loop of one's own: two models, two optimizers and two losses that share a graph, under any plan.

unisono run -n 2 examples/gan.py dp=2,zero=1

Noise and data are drawn from seeds, so that all ranks have the same; of what a model is given, each rank runs its part.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni

NOISE, BATCH = 4, 12


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(NOISE, 16), nn.ReLU(), nn.Linear(16, 2))


def discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, betas=(0.5, 0.999))


def ring(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on a circle, which are to be imitated, and noise."""
    draw = torch.Generator().manual_seed(step)
    angle = torch.rand(BATCH, generator=draw) * 2 * torch.pi
    return torch.stack([angle.cos(), angle.sin()], 1), torch.randn(BATCH, NOISE, generator=draw)


def judged(d: Any, points: torch.Tensor, is_real: bool) -> torch.Tensor:
    verdict = d.model(points)
    return F.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, float(is_real)))


def train(g: Any, d: Any, steps: int) -> Iterator[tuple[float, float]]:
    """g and d have a model and an optimizer: trainers, or two plain objects with a module and its torch optimizer."""
    for step in range(steps):
        real, noise = ring(step)
        fake = g.model(noise)
        d.optimizer.zero_grad()
        loss_d = judged(d, real, True) + judged(d, fake.detach(), False)
        loss_d.backward()
        d.optimizer.step()

        g.optimizer.zero_grad()
        loss_g = judged(d, fake, True)  # its backward passes through both models
        loss_g.backward()
        g.optimizer.step()
        yield loss_d.item(), loss_g.item()


def main(plan: str) -> None:
    comm = uni.init()
    real, noise = ring(0)
    # The loss and the example serve the proof of the plan; the loop below has losses of its own.
    g = uni.parallelize(generator, plan, loss=F.mse_loss, optimizer=adam, seed=1, example=(noise, real))
    d = uni.parallelize(discriminator, plan, loss=F.mse_loss, optimizer=adam, seed=2, example=(real, real[:, :1]))
    for step, (loss_d, loss_g) in enumerate(train(g, d, 40)):
        if comm.rank == 0 and step % 13 == 0:
            print(f"step {step}: discriminator {loss_d:.4f}, generator {loss_g:.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
