"""How ops do in a training step: what each takes beside its work, and how much of their own rates they reach.

`machine` times ops by themselves, over and over, with code and data in the caches. In a step they come one after
another, from modules, and find the caches cold and memory new. So models are trained for some steps, and the measured
step is compared with the prediction from ops: first one with little to compute, in plain torch, with few layers and
with more, which gives the overhead of an op; then two with work to do, under data parallelism, one with many rows and
one with wide layers. The overhead of a pipeline stage is seen where the same blocks are split into more stages.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from unisono.comm.rendezvous import world
from unisono.launch.spawn import spawn
from unisono.parallel.apply import parallelize
from unisono.parallel.task import Task
from unisono.plan.cost.time import Duration
from unisono.plan.hardware.spec import Hardware
from unisono.plan.plan import Plan
from unisono.plan.schedules.action import Action
from unisono.plan.search.search import Search
from unisono.planner.planner import Planner

STEPS, _WARM_UP = 40, 4
_CLASSES = 100
_MICROBATCHES = 4
_Timed = Callable[[Callable[[], object]], list[float]]


class Size(NamedTuple):
    width: int
    heads: int
    layers: int
    length: int
    rows: int  # samples on a rank


LITTLE = (Size(48, 3, 2, 24, 1), Size(48, 3, 10, 24, 1))
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

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters)

    return Task(lambda: _Model(size), loss, optimizer, batch, rules={})  # none are searched for: nothing is sharded


class Calibration(NamedTuple):
    overhead: float  # `[device] op_overhead`
    together: float  # `[efficiency] together`
    stage: float  # `[device] stage_overhead`


def calibrated(hardware: Hardware, ranks: int, backend: str | None, steps: int = STEPS) -> Calibration:
    """`hardware` has been measured with so many ranks, op by op. steps: of each model."""
    found = spawn(_trained, ranks, backend, (ranks, steps))
    taken = [of_sizes for of_sizes, _ in found]
    measured = [usual([each[number] for each in taken]) for number in range(len(LITTLE + SIZES))]
    overhead = _overhead(hardware, measured[: len(LITTLE)])
    known = replace(hardware, op_overhead=overhead)
    stage = sum(forwards for _, forwards in found) / max(ranks, 1)
    return Calibration(overhead, together(known, ranks, measured[len(LITTLE) :]), max(stage, 0.0))


def usual(of_ranks: list[list[float]]) -> float:
    """Seconds of a step, which is as long as its slowest rank."""
    return statistics.median(max(step) for step in zip(*of_ranks, strict=True))


def _predicted(planner: Planner, hardware: Hardware, ranks: int = 1) -> Duration:
    search = Search(planner.profile, ranks, hardware, planner.allows)
    return search.judged(Plan(dp=ranks), played=True).duration


def _overhead(hardware: Hardware, measured: list[float]) -> float:
    """Layers differ in what ops take beside their work, times their number: a straight line, of which two points are
    predicted."""

    planners = [Planner(task(size, 1), hardware) for size in LITTLE]

    def layers(overhead: float) -> float:
        few, more = (_predicted(each, replace(hardware, op_overhead=overhead)).compute for each in planners)
        return more - few

    work, with_ops = layers(0.0), layers(hardware.op_overhead)
    share = (measured[1] - measured[0] - work) / (with_ops - work)
    return hardware.op_overhead * max(share, 0.1)


def together(hardware: Hardware, ranks: int, measured: list[float], sizes: tuple[Size, ...] = SIZES) -> float:
    """Of models of these sizes, whose steps have been measured under data parallelism."""
    shares = []
    for size, step in zip(sizes, measured, strict=True):
        predicted = _predicted(Planner(task(size, ranks), hardware), hardware, ranks)
        computing = step - (predicted.total - predicted.compute)
        shares.append(predicted.compute / max(computing, predicted.compute / 4))
    return min(math.prod(shares) ** (1 / len(shares)), 1.0)


def _trained(ranks: int, count: int) -> tuple[list[list[float]], float]:
    """On a rank: seconds of the steps of each size, and by how many its forwards of a microbatch take longer where it
    has two stages for one."""
    torch.set_num_threads(1)
    comm = world.init()
    try:
        timed = partial(_timed, comm, count)
        taken = [*(_plain_steps(timed, size) for size in LITTLE), *(steps(comm, size, ranks, count) for size in SIZES)]
        if ranks == 1:
            return taken, 0.0
        more, fewer = (_forwards(timed, ranks, cut) for cut in (",schedule=interleaved,chunks=2", ""))
        return taken, more - fewer
    finally:
        world.shutdown()


def steps(comm: Any, size: Size, ranks: int, count: int = STEPS) -> list[float]:
    """Seconds of the steps of a model under data parallelism."""
    job = task(size, ranks)
    given = job.batch(0)
    trainer = parallelize(job.model, Plan(dp=ranks), loss=job.loss, optimizer=job.optimizer, example=given)
    return _timed(comm, count, lambda: trainer.step(given))


def _plain_steps(timed: _Timed, size: Size) -> list[float]:
    """Forwards and backwards on each rank by itself."""
    job = task(size, 1)
    inputs, targets = job.batch(0)
    model = job.model()

    def step() -> None:
        model.zero_grad()
        job.loss(model(inputs), targets).backward()

    return timed(step)


def _forwards(timed: _Timed, ranks: int, cut: str) -> float:
    """Seconds of the forwards of this rank's stages for one microbatch; either plan has the same blocks."""
    job = task(LITTLE[0]._replace(layers=2 * ranks, rows=_MICROBATCHES), 1)
    given = job.batch(0)
    plan = f"pp={ranks}{cut},microbatches={_MICROBATCHES}"
    trainer = parallelize(job.model, plan, loss=job.loss, optimizer=job.optimizer, example=given)
    taken: dict[int, list[float]] = {}

    def note(action: Action, began: float, ended: float) -> None:
        if action.kind == "F":
            taken.setdefault(action.stage, []).append(ended - began)

    trainer.on_action = note
    timed(lambda: trainer.step(given))
    return sum(map(statistics.median, taken.values()))


def _timed(comm: Any, count: int, step: Callable[[], object]) -> list[float]:
    taken = []
    for _ in range(_WARM_UP + count):
        comm.barrier()
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return taken[_WARM_UP:]
