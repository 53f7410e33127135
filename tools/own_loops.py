"""Random jobs trained in a loop of one's own, `loss(trainer.model(x), y).backward(); trainer.optimizer.step()`.

`python tools/fuzz.py --own-loop` runs every pair that is equivalent so: the result must be that of one device again, or
be refused in one sentence.
"""

from __future__ import annotations

import gc
import pickle
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.pairs import EQUIVALENT, RAW, REFUSED, WRONG, Outcome
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.apply import parallelize
from unisono.parallel.expert.expert import collect_aux
from unisono.parallel.inputs import call
from unisono.parallel.task import Task
from unisono.parallel.trainer import Trainer, takes_closure
from unisono.verify.float64 import Float64Mode
from unisono.verify.training_record import TrainingRecord, batch_of

_TOLERANCE = 1e-8


def suits(plan: str) -> bool:
    """A loop calls the model once a step, and as a whole."""
    return "pp=" not in plan and "microbatches" not in plan


def outcome(comm: Communicator, load: Callable[[Any], Task], name: Any, plan: str, reference: bytes) -> Outcome:
    """On every rank: whether the loop gives what one device gave."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _compared(load(name), plan, pickle.loads(reference))
    except UsageError as error:
        return Outcome(REFUSED, str(error))
    except Exception:
        return Outcome(RAW, traceback.format_exc())
    finally:
        gc.collect()


def _compared(task: Task, plan: str, expected: TrainingRecord) -> Outcome:
    example = batch_of(task, 0, torch.float64)
    trainer = parallelize(
        task.model,
        plan,
        loss=task.loss,
        optimizer=task.optimizer,
        example=example,
        clip=task.clip,
        dtype=torch.float64,
        batch_dim=task.batch_dim,
    )
    if takes_closure(trainer.optimizer):
        return Outcome(EQUIVALENT)
    for step, theirs in enumerate(expected.losses):
        mine = _step(trainer, task, *batch_of(task, step, torch.float64))
        if abs(mine - theirs) > _TOLERANCE * max(1.0, abs(theirs)):
            return Outcome(WRONG, f"the loss of step {step} is {mine!r}; expected {theirs!r}")
    for name, mine in trainer.state_dict()["model"].items():
        theirs = expected.parameters.get(name)
        if theirs is None or not theirs.numel():
            continue
        far = (mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3)
        if not far < _TOLERANCE:
            return Outcome(WRONG, f"{name} is off by {float(far):.1e}")
    return Outcome(EQUIVALENT)


def _step(trainer: Trainer, task: Task, x: Any, y: Any) -> float:
    trainer.optimizer.zero_grad()
    with Float64Mode(torch.float64):
        loss = task.loss(call(trainer.model, x), y)
        aux = collect_aux(trainer.model)
        loss = loss if aux is None else loss + aux
        loss.backward()
    trainer.optimizer.step()
    return float(loss)
