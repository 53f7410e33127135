"""What the host of a device takes for a step: launching ops, and what unisono does around them.

Measured on models with next to nothing to compute, of few layers and of many: the difference is what layers take, the
rest what a step takes. They are trained as one rank of eight whose others are not there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from unisono.comm.rendezvous import world
from unisono.mesh.mesh import Mesh
from unisono.mesh.random.state import RandomState
from unisono.parallel.apply import parallelize
from unisono.parallel.autograd_collectives import gather_to_use, reduce_to_shard
from unisono.parallel.compose import Composition, compose
from unisono.parallel.pipeline.backward import Arrival, Pass
from unisono.parallel.pipeline.message import MessageForm, TensorForm
from unisono.parallel.recompute import recompute
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import AXES, Plan

FEW, MANY = 8, 24  # layers
_PARAMETERS = 6  # of a layer
_MATRICES = 2  # of these
# As `plan.cost.op_time` counts: 5 ops forward, and backward 5, two more products, and six gradients.
_LAUNCHES = 5 + 5 + 2 + _PARAMETERS
_RANKS, _WIDTH = 8, 8


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, _WIDTH)
        self.down = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _model(layers: int, device: torch.device) -> nn.Module:
    return nn.Sequential(*(_Layer() for _ in range(layers))).to(device)


class _Parts(NamedTuple):
    """Seconds of a step: before and in the backward, and after it."""

    computing: float
    after: float


def overheads(device: torch.device, rounds: int = 15) -> dict[str, Any]:
    """Figures for `planner.measure.figures.hardware_of`."""
    clock = Clock(device, rounds)
    plain = clock.plain(FEW)
    layer = max(clock.plain(MANY) - plain, plain / 4) / (MANY - FEW)
    in_backward, after = [], []
    for zero in range(4):
        plan = f"dp={_RANKS}" + (f",zero={zero}" if zero else "")
        few, many = clock.trained(plan, FEW), clock.trained(plan, MANY)
        each = (MANY - FEW) * _PARAMETERS
        in_backward.append(max((many.computing - few.computing) / each - layer / _PARAMETERS, 0.0))
        after.append(max((many.after - few.after) / each, 0.0))
        if zero == 0:
            ends = few.after - after[0] * FEW * _PARAMETERS
            whole = few.computing - FEW * (layer + in_backward[0] * _PARAMETERS)
    several = clock.trained(f"dp={_RANKS},microbatches=4", FEW).computing
    once = FEW * layer
    microbatch = (several - whole - 4 * once - FEW * _PARAMETERS * in_backward[0]) / 3
    return {
        "overhead": layer / _LAUNCHES,
        "gradient": in_backward,
        "parameter": after,
        "message": clock.message(),
        "step": max(whole + ends, 0.0),
        "microbatch": max(microbatch, 0.0),
        **clock.of_backwards(),
    }


class Clock:
    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device = device
        self.rounds = rounds

    def _median(self, call: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        for _ in range(3):
            call()
        taken = [call() for _ in range(self.rounds)]
        return tuple(statistics.median(column) for column in zip(*taken, strict=True))

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def of_backwards(self) -> dict[str, float]:
        """What a block takes more where it is computed again, and a layer whose backward runs in halves."""
        again = self.plain(FEW, again=True) - self.plain(FEW) - self.forward(FEW)
        halves = self.halved() - self.halved(whole=True)
        return {"recompute": max(again, 0.0) / FEW, "split": max(halves, 0.0) / (FEW * _MATRICES)}

    def forward(self, layers: int) -> float:
        model = _model(layers, self.device)
        x = torch.ones(2, _WIDTH, device=self.device, requires_grad=True)

        def call() -> tuple[float]:
            start = self._now()
            model(x)
            return (self._now() - start,)

        return self._median(call)[0]

    def plain(self, layers: int, again: bool = False) -> float:
        """Forward and backward in torch; with every layer computed again, or without."""
        model = recompute(_model(layers, self.device), "full" if again else "none")
        x = torch.ones(2, _WIDTH, device=self.device, requires_grad=True)

        def call() -> tuple[float]:
            model.zero_grad()
            start = self._now()
            model(x).sum().backward()
            return (self._now() - start,)

        return self._median(call)[0]

    def halved(self, whole: bool = False) -> float:
        """The backward of a pipeline's stage, in halves or whole."""
        model = _model(FEW, self.device)
        x = torch.ones(2, _WIDTH, device=self.device)
        form = MessageForm((TensorForm(tuple(x.shape), x.dtype, True),), ((0,),), 1, ())

        def call() -> tuple[float]:
            model.zero_grad()
            arrival = Arrival([x], form)
            one = Pass.of(arrival, [model(arrival.tensors[0])])
            start = self._now()
            if whole:
                one.backward([x])
            else:
                one.backward_inputs([x])
                one.backward_weights()
            return (self._now() - start,)

        return self._median(call)[0]

    def message(self) -> float:
        """One along the sequence, where a tensor-parallel region begins or ends, forward or backward."""
        with world.simulated(0, 2) as comm:
            x = torch.ones(2, 2, _WIDTH, device=self.device, requires_grad=True)

            def call() -> tuple[float]:
                start = self._now()
                y = x
                for _ in range(FEW):
                    y = reduce_to_shard(gather_to_use(y, 1, (2, 2), comm), 1, (2, 2), comm)
                y.sum().backward()
                return ((self._now() - start) / (4 * FEW),)

            return self._median(call)[0]

    def trained(self, text: str, layers: int) -> _Parts:
        plan = Plan.parse(text)
        with world.simulated(0, plan.world):
            mesh = Mesh(plan.shape, AXES).connect()
            trainer = self._trainer(plan, mesh, layers)
            rows = plan.dp * plan.microbatches
            batch = tuple(torch.ones(rows, _WIDTH, device=self.device) for _ in range(2))
            finish, ended = trainer.replicas.finish, [0.0]

            def noted() -> None:
                ended[0] = self._now()
                finish()

            trainer.replicas.finish = noted  # type: ignore[method-assign]

            def call() -> tuple[float, float]:
                start = self._now()
                trainer.step(batch)  # type: ignore[arg-type]
                return ended[0] - start, self._now() - ended[0]

            return _Parts(*self._median(call))

    def _trainer(self, plan: Plan, mesh: Mesh, layers: int) -> Trainer:
        model = _model(layers, self.device)
        random = RandomState(0)
        random.name_modules(model)

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(parameters, lr=0.0)

        return compose(Composition(model, plan, mesh, random, F.mse_loss, optimizer, clip=1.0))


def around_steps(device: Any, steps: int) -> dict[str, float]:
    """Figures of what is around the ops of a step, and of each further microbatch; all ranks of the world call it."""
    step, several = _step_overhead(device, 1, steps), _step_overhead(device, 4, steps)
    return {"step": step, "microbatch": max(several - step, 0.0) / 3}


def _step_overhead(device: Any, microbatches: int, steps: int) -> float:
    """Seconds that a step takes which has next to nothing to compute: what is around the ops of every step."""
    comm = world.world()
    rows = comm.size * microbatches
    batch = (torch.ones(rows, 4, device=device), torch.ones(rows, 4, device=device))
    model = torch.nn.Linear(4, 4).to(device)
    trainer = parallelize(
        model,
        f"dp={comm.size},microbatches={microbatches}",
        loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )
    taken = []
    for _ in range(steps):
        comm.barrier()
        start = time.perf_counter()
        trainer.step(batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[steps // 3]
