"""Faults planted into sound runs: whatever verify finds, the self-check of uni.parallelize must find as well.

`python tools/fuzz.py --self-check` gives every pair that is equivalent one of these faults and asks both.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import unisono as uni
from unisono.comm.communicator import Communicator
from unisono.errors import PlanMismatch
from unisono.parallel.task import Task
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import Plan
from unisono.verify import self_check
from unisono.verify.verify import verify_here

CAUGHT, MISSED, HARMLESS = "caught", "missed", "harmless"
Plant = Callable[[Trainer], None]


def judge(comm: Communicator, load: Callable[[Any], Task], name: Any, plan: str, fault: str) -> str:
    """On every rank: whether the self-check stops a run with this fault. HARMLESS: verify says that the first
    step, which the self-check sees, is equivalent."""
    plant = partial(FAULTS[fault], comm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if verify_here(comm, load(name), Plan.parse(plan), 1, prepare=plant).equivalent:
            return HARMLESS
        return CAUGHT if _is_stopped(load(name), plan, plant) else MISSED


def _is_stopped(task: Task, plan: str, plant: Plant) -> bool:
    """The fault is in the step that is compared and, where the check has a second one in float64, in that."""
    step = self_check.planned_step

    def with_fault(trainer: Trainer, *args: Any) -> Any:
        plant(trainer)
        return step(trainer, *args)

    self_check.planned_step = with_fault
    self_check.verify_here = partial(verify_here, prepare=plant)
    try:
        uni.parallelize(
            task.model,
            plan,
            loss=task.loss,
            optimizer=task.optimizer,
            example=task.batch(0),
            rules=task.rules,
            clip=task.clip,
            batch_dim=task.batch_dim,
        )
    except PlanMismatch:
        return True
    finally:
        self_check.planned_step, self_check.verify_here = step, verify_here
    return False


# ---- faults ----------------------------------------------------------------------------------------------------------


def _chosen(trainer: Trainer) -> torch.Tensor | None:
    """A parameter that is trained; on all ranks that have it the same."""
    trained = [parameter for _, parameter in trainer.optimized() if parameter.requires_grad and parameter.numel()]
    return random.Random(len(trained)).choice(trained) if trained else None


def other_weights(comm: Communicator, trainer: Trainer) -> None:
    """A parameter of the last rank has other values."""
    parameter = _chosen(trainer)
    if parameter is not None and comm.rank == comm.size - 1:
        with torch.no_grad():
            parameter.mul_(1.01)


def scaled_gradient(comm: Communicator, trainer: Trainer) -> None:
    """The last rank's part of a gradient counts one and a half times."""
    parameter = next((each for each in trainer.model.parameters() if each.requires_grad and each.numel()), None)
    if parameter is not None and comm.rank == comm.size - 1:
        parameter.register_hook(lambda gradient: gradient * 1.5)


def lost_update(comm: Communicator, trainer: Trainer) -> None:
    """The optimizer leaves a parameter of the last rank as it is."""
    parameter, step = _chosen(trainer), trainer.optimizer.step

    def step_without(*args: Any, **kwargs: Any) -> Any:
        before = None if parameter is None else parameter.detach().clone()
        made = step(*args, **kwargs)
        if parameter is not None and before is not None and comm.rank == comm.size - 1:
            with torch.no_grad():
                parameter.copy_(before)
        return made

    trainer.optimizer.step = step_without  # type: ignore[method-assign]


def other_rate(comm: Communicator, trainer: Trainer) -> None:
    """The last rank learns faster."""
    if comm.rank == comm.size - 1:
        for group in trainer.optimizer.param_groups:
            group["lr"] = group["lr"] * 1.1


def other_random_numbers(comm: Communicator, trainer: Trainer) -> None:
    """The last rank draws other masks."""
    if comm.rank == comm.size - 1:
        trainer.random.seed += 1


def no_clipping(comm: Communicator, trainer: Trainer) -> None:
    trainer.clip = None


def swapped_samples(comm: Communicator, trainer: Trainer) -> None:
    """Inputs keep their order, targets do not."""
    targets = trainer._targets
    trainer._targets = lambda part: _flipped(targets(part))  # type: ignore[method-assign]


def _flipped(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf.flip(0) if isinstance(leaf, torch.Tensor) else leaf, tree)


FAULTS: dict[str, Callable[[Communicator, Trainer], None]] = {
    "other weights": other_weights,
    "scaled gradient": scaled_gradient,
    "lost update": lost_update,
    "other rate": other_rate,
    "other random numbers": other_random_numbers,
    "no clipping": no_clipping,
    "swapped samples": swapped_samples,
}
