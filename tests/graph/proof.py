"""Programs under placements by chance, held against one device; each rank traces a task once."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch

import unisono as uni
from tests.graph.chance import chance_assignment
from unisono.comm.communicator import Communicator
from unisono.graph.trace import Trace, trace
from unisono.mesh.initial import build
from unisono.train.double import InDouble
from unisono.train.program_record import program_record
from unisono.train.record import Record, batch_of, plain_record
from unisono.train.task import Task
from unisono.train.verdict import Verdict, compared

ROWS = 8
STEPS = 2
_traces: dict[tuple[str, str], Trace] = {}
_plain: dict[tuple[str, str], Record] = {}


def even(task: Task) -> Task:
    """The task with batches that 2, 4 and 8 ranks can share evenly."""

    def batch(seed: int) -> Any:
        return torch.utils._pytree.tree_map(_cut, task.batch(seed))

    return replace(task, batch=batch)


def _cut(leaf: Any) -> Any:
    return leaf[:ROWS] if isinstance(leaf, torch.Tensor) else leaf


def task_of(module: str, name: str) -> Task:
    found = getattr(importlib.import_module(module), name)
    return even(found)


def traced(module: str, name: str) -> Trace:
    if (module, name) not in _traces:
        task = task_of(module, name)
        with InDouble(torch.float64):
            model = build(task.model, 0).to(torch.float64)
            _traces[module, name] = trace(model, batch_of(task, 0, torch.float64), task.loss)
    return _traces[module, name]


def prove(
    comm: Communicator, module: str, name: str, shape: tuple[int, ...], seeds: list[int]
) -> list[tuple[int, Verdict]]:
    """The verdicts on programs whose placements are drawn from these seeds."""
    task = task_of(module, name)
    if comm.rank == 0 and (module, name) not in _plain:
        _plain[module, name] = plain_record(task, STEPS, torch.float64)
    mesh = uni.Mesh(shape, ("a", "b", "c")[: len(shape)])
    verdicts = []
    for seed in seeds:
        chosen = chance_assignment(traced(module, name), mesh, seed)
        planned = program_record(task, mesh, STEPS, torch.float64, assignment=chosen)
        if comm.rank == 0:
            verdicts.append((seed, compared(f"{name} by chance {seed}", _plain[module, name], planned, "float64")))
    return verdicts
