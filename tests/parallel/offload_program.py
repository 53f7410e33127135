"""Optimizer state in host memory, on CUDA: as without; started by `unisono run`."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

import unisono as uni
from unisono.parallel.trainer import Trainer
from unisono.parallel.zero.zero import ShardedOptimizer

WIDTH, LAYERS = 256, 4


def model() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10)).cuda()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(7, WIDTH, generator=generator).cuda(), torch.randint(10, (7,), generator=generator).cuda()


def trained(plan: str, precision: str) -> tuple[Trainer, list[float], int]:
    gc.collect()  # an earlier trainer's memory is not to be counted as given back by this one
    before = torch.cuda.memory_allocated()
    trainer = uni.parallelize(
        model,
        plan,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        clip=0.5,
        precision=precision,
    )
    losses = [float(trainer.step(batch(step))) for step in range(4)]
    trainer.zero_grad()
    return trainer, losses, torch.cuda.memory_allocated() - before


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    return [value for entries in trainer.optimizer.state.values() for value in entries.values() if value.ndim]


def compare(plan: str, precision: str) -> None:
    plain, losses, held = trained(plan, precision)
    other, losses_there, held_there = trained(f"{plan},offload", precision)
    assert isinstance(other.replicas, ShardedOptimizer)
    assert {tensor.device.type for tensor in state_of(plain)} == {"cuda"}
    assert {tensor.device.type for tensor in state_of(other)} == {"cpu"}
    assert {parameter.device.type for parameter in other.model.parameters()} == {"cuda"}
    moments = sum(tensor.numel() * tensor.element_size() for tensor in state_of(other))
    assert held - held_there > 0.9 * moments, (held, held_there, moments)
    # AdamW's first steps are signs, and rounding to halves turns some: only norms can be held against each other there.
    allowed = 1e-4 if precision == "fp32" else 2e-2
    torch.testing.assert_close(losses_there, losses, rtol=allowed, atol=0)
    one, two = plain.state_dict(), other.state_dict()
    for name, tensor in one["model"].items():
        deviation = (two["model"][name].cuda() - tensor.cuda()).norm() / tensor.norm().cuda()
        assert deviation < allowed, (name, deviation)
    tell: dict[str, Any] = {"plan": plan, "precision": precision, "bytes on the GPU": held, "offloaded": held_there}
    print(tell if uni.world().rank == 0 else "", flush=True)


def main() -> None:
    comm = uni.init()
    torch.backends.cuda.matmul.allow_tf32 = False
    trained(f"dp={comm.size}", "fp32")  # what CUDA's libraries keep for themselves is allocated by the first
    for stage in (1, 2, 3):
        compare(f"dp={comm.size},zero={stage}", "fp32")
    compare(f"dp={comm.size},zero=3", "fp16")
    compare(f"dp={comm.size},zero=1", "bf16")


if __name__ == "__main__":
    main()
