"""verify among the ranks of a pool; the plain model of a task runs once a pool, and not once a plan."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.plan.plan import Plan
from unisono.train.record import Record, plain_record
from unisono.train.verdict import Verdict
from unisono.train.verify import verify_here

_plain: dict[tuple[Any, ...], Record] = {}


def prove(comm: Communicator, module: str, task: str, plan: str, steps: int = 2) -> Verdict:
    found = getattr(importlib.import_module(f"tests.equivalence.{module}"), task)
    key = (module, task, steps)
    if comm.rank == 0 and key not in _plain:
        _plain[key] = plain_record(found, steps, torch.float64)
    return verify_here(comm, found, Plan.parse(plan), steps, plain=_plain.get(key))


def refused(comm: Communicator, module: str, task: str, plan: str) -> str:
    """Why a plan is refused, on every rank: none is left waiting."""
    try:
        prove(comm, module, task, plan)
    except UsageError as error:
        comm.barrier()
        return str(error)
    raise AssertionError(f"plan {plan} was expected to be refused for {task}")
