"""Programs held against one device among the ranks of a pool; each rank traces a task once."""

from __future__ import annotations

import torch
import torch.export._trace  # here, so that ranks that are forked later need not

import unisono as uni
from tests.graph.chance import chance_assignment
from tests.graph.tasks import TASKS
from unisono.comm.communicator import Communicator
from unisono.graph.capture.trace import Trace, trace
from unisono.mesh.deferred_init.seeded_init import build
from unisono.verify.compare import Verdict, compared
from unisono.verify.float64 import Float64Mode
from unisono.verify.mesh_program import ProgramSpec, program_record
from unisono.verify.training_record import TrainingRecord, batch_of, plain_record
from unisono.verify.verify import verify_here

STEPS = 2
_traces: dict[str, Trace] = {}
_plain: dict[str, TrainingRecord] = {}


def plain(comm: Communicator, name: str) -> TrainingRecord | None:
    if comm.rank == 0 and name not in _plain:
        _plain[name] = plain_record(TASKS[name], STEPS, torch.float64)
    return _plain.get(name)


def traced(name: str) -> Trace:
    if name not in _traces:
        task = TASKS[name]
        with Float64Mode(torch.float64):
            model = build(task.model, 0).to(torch.float64)
            _traces[name] = trace(model, batch_of(task, 0, torch.float64), task.loss, unpacked=name == "unpacked")
    return _traces[name]


def prove(comm: Communicator, name: str, words: list[str]) -> list[Verdict]:
    """The verdicts of verify on the programs of a task on some meshes."""
    return [verify_here(comm, TASKS[name], ProgramSpec.parse(w), STEPS, plain=plain(comm, name)) for w in words]


def prove_by_chance(comm: Communicator, name: str, shape: tuple[int, ...], seeds: list[int]) -> list[Verdict]:
    """The verdicts on programs whose placements are drawn by chance, on rank 0."""
    reference = plain(comm, name)
    mesh = uni.Mesh(shape, ("a", "b", "c")[: len(shape)])
    verdicts = []
    for seed in seeds:
        chosen = chance_assignment(traced(name), mesh, seed)
        planned = program_record(TASKS[name], mesh, STEPS, torch.float64, assignment=chosen)
        if reference is not None:
            verdicts.append(compared(f"{name} by chance {seed}", reference, planned, "float64"))
    return verdicts
