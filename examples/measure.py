"""What a plan costs a rank of a small GPT: bytes held, bytes sent in a step, and the loss, which no plan changes.

python examples/measure.py dp=2 dp=2,zero=1 dp=2,zero=2 dp=2,zero=3

Of the ranks of a plan, the one with most is shown. KB are 1,000 bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import unisono as uni
from unisono.comm import traffic
from unisono.parallel.task import load_task
from unisono.plan.plan import Plan
from unisono.train.telemetry.step_profile import SavedActivations

HERE = Path(__file__).resolve().parent


class Cost(NamedTuple):
    """Bytes of one rank, but for the loss."""

    loss: float
    parameters: int
    gradients: int
    optimizer: int
    activations: int  # the most that autograd kept at any time for the backward, parameters not counted
    sent: float
    calls: dict[str, int]


def size(tensors: Iterable[Any]) -> int:
    """Bytes of the memory that tensors lie in, each counted once."""
    found = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def cost(address: str, plan: str) -> Cost:
    """Called on every rank: two steps, of which the second is measured."""
    task = load_task(address)
    trainer = uni.parallelize(
        task.model,
        plan,
        loss=task.loss,
        optimizer=task.optimizer,
        example=task.batch(0),
        rules=task.rules,
        clip=task.clip,
    )
    trainer.step(task.batch(0))
    trainer.zero_grad()
    saved = SavedActivations(trainer.model)
    with traffic.counted() as seen, torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        loss = trainer.backward(task.batch(1))
        optimized = [tensor for _, tensor in trainer.optimized()]
        gradients = size(tensor.grad for tensor in [*trainer.model.parameters(), *optimized])
        trainer.update()
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    return Cost(
        loss.item(), size([*trainer.model.parameters(), *optimized]), gradients, size(states), saved.peak,
        seen.sent, dict(seen.calls),
    )  # fmt: skip


def measure(address: str, plan: str) -> list[Cost]:
    """What every rank of the plan measures."""
    return uni.spawn(cost, Plan.parse(plan).world, args=(address, plan))


def table(plans: list[str], address: str) -> None:
    """One row a plan."""
    width = max(len(plan) for plan in plans)
    print(f"{'plan':<{width}}     loss  parameters  gradients  optimizer  activations    sent KB  by")
    for plan in plans:
        ranks = measure(address, plan)
        most = [max(cost[index] for cost in ranks) / 1000 for index in range(1, 6)]
        output = ", ".join(f"{count} {name}" for name, count in sorted(ranks[0].calls.items()))
        print(
            "{:<{}}  {:.5f}  {:10.1f} {:10.1f} {:10.1f} {:12.1f} {:10.1f}".format(plan, width, ranks[0].loss, *most),
            output,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", nargs="+")
    parser.add_argument("--task", default=f"{HERE / 'gpt.py'}:tiny", help="file.py:name")
    chosen = parser.parse_args()
    table(chosen.plan, chosen.task)
