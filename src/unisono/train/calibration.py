"""How much of their own rates ops reach in a training step.

`plan.measure` times ops by themselves, over and over, on memory that caches hold. In a step they come one after another
and find the caches cold and memory new. So two small models, one with many rows and one with wide layers, are trained
for some steps as a plan says, and what computing takes in them is held against what the planner foresees from the ops.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from unisono.comm import world
from unisono.launch.spawn import spawn
from unisono.parallel.apply import parallelize
from unisono.plan.hardware import Hardware
from unisono.plan.plan import Plan
from unisono.train.planning import Planner
from unisono.train.task import Task

_STEPS, _WARM_UP = 40, 4
_CLASSES = 100


class Size(NamedTuple):
    width: int
    heads: int
    layers: int
    length: int
    rows: int  # samples on a rank


SIZES = (Size(96, 3, 4, 96, 8), Size(320, 5, 3, 48, 1))


class _Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(2))
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class _Model(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_CLASSES, size.width)
        self.blocks = nn.ModuleList(_Layer(size) for _ in range(size.layers))
        self.head = nn.Linear(size.width, _CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def task(size: Size, ranks: int) -> Task:
    def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.Generator().manual_seed(seed)
        made = torch.randint(_CLASSES, (size.rows * ranks, size.length + 1), generator=drawn)
        return made[:, :-1], made[:, 1:]

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Task(lambda: _Model(size), loss, lambda parameters: torch.optim.AdamW(parameters), batch)


def together(hardware: Hardware, ranks: int, backend: str | None) -> float:
    """The share, for `[efficiency] together`; `hardware` has been measured with so many ranks, without it."""
    taken = spawn(_trained, ranks, backend, (ranks,))
    plan = Plan(dp=ranks)
    shares = []
    for number, size in enumerate(SIZES):
        foreseen = Planner(task(size, ranks), hardware).search(ranks).judged(plan, played=True).duration
        steps = sorted(max(step) for step in zip(*(each[number] for each in taken), strict=True))
        measured = steps[len(steps) // 4]  # what else the machine does only adds to them
        computing = measured - (foreseen.total - foreseen.compute)
        shares.append(foreseen.compute / max(computing, foreseen.compute / 4))
    return min(math.prod(shares) ** (1 / len(shares)), 1.0)


def _trained(ranks: int) -> list[list[float]]:
    """On a rank: seconds of the steps of each size."""
    torch.set_num_threads(1)
    comm = world.init()
    try:
        return [_steps(comm, size, ranks) for size in SIZES]
    finally:
        world.shutdown()


def _steps(comm: Any, size: Size, ranks: int) -> list[float]:
    job = task(size, ranks)
    given = job.batch(0)
    trainer = parallelize(job.model, Plan(dp=ranks), loss=job.loss, optimizer=job.optimizer, example=given)
    taken = []
    for _ in range(_WARM_UP + _STEPS):
        comm.barrier()
        start = time.perf_counter()
        trainer.step(given)
        taken.append(time.perf_counter() - start)
    return taken[_WARM_UP:]
