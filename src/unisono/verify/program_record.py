"""A record of a few training steps of a distributed program, to be held against those of the plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unisono.graph.program.program import Program
from unisono.mesh.initial import build
from unisono.mesh.mesh import Mesh
from unisono.parallel.static.to_static import StagedProgram, to_static
from unisono.parallel.task import Task
from unisono.verify.float64 import InDouble
from unisono.verify.record import Record, batch_of, flat_state, leave_out, trainer_record

Tensors = dict[str, torch.Tensor]


def program_record(
    task: Task,
    mesh: Mesh,
    steps: int,
    dtype: torch.dtype,
    seed: int = 0,
    prepare: Callable[[Any], None] | None = None,
    rounding: float = 0.0,
    **options: Any,
) -> Record:
    """The steps of a task as a program on a mesh; every rank calls it and gets the whole record.

    options: how `to_static` finds placements.
    """
    program = made_program(task, mesh, dtype, seed, **options)
    if isinstance(program, StagedProgram):
        return trainer_record(program.trainer, task, steps, dtype, prepare, rounding)
    pieces = program.pieces
    record = Record(initial=_whole(program, dict(pieces.parameters)))
    if prepare is not None:
        prepare(program)
    for step in range(steps):
        batch = batch_of(task, step, dtype)
        program.zero_grad()
        with InDouble(dtype):
            record.losses.append(program.backward(batch).item())
        found = {name: parameter.grad for name, parameter in pieces.parameters.items() if parameter.grad is not None}
        record.gradients.append(_whole(program, found))
        leave_out(rounding, pieces.parameters.values())
        program.update()
        record.scales.append(1.0)
    record.parameters = _whole(program, dict(pieces.parameters))
    record.buffers = _whole(program, pieces.buffers)
    record.optimizer = flat_state(pieces.whole_optimizer(program.optimizer)["state"])
    return record


def made_program(task: Task, mesh: Mesh, dtype: torch.dtype, seed: int = 0, **options: Any) -> Program | StagedProgram:
    whole, example = build(task.model, seed), batch_of(task, 0, dtype)  # the user's own dtypes, so not within InDouble
    with InDouble(dtype):
        made: Program | StagedProgram = to_static(
            lambda: whole,
            example=example,
            mesh=mesh,
            loss=task.loss,
            optimizer=task.optimizer,
            clip=task.clip,
            seed=seed,
            dtype=dtype,
            **options,
        )
    return made


def _whole(program: Program, tensors: dict[str, Any]) -> Tensors:
    return {name: program.pieces.whole(name, tensor).cpu() for name, tensor in tensors.items()}
