"""verify: the proof that a plan gives the result of one device, or the first place where it does not.

A task is trained for a few steps on one device and under the plan, from the same seed and batches. Initial parameters
must be equal bit for bit; losses, gradients, parameters, buffers and optimizer states must agree to a tolerance that
leaves room for rounding only: in float64, what differs by more is a bug.

Many plans are tried by the same ranks, one after the other, against one run of the plain model. A plan that is refused
by all ranks leaves them as they were; one that fails on some ends them, and the rest is tried by new ones.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unisono.comm import world
from unisono.comm.communicator import Communicator
from unisono.errors import LaunchError, UsageError
from unisono.launch.spawn import spawn
from unisono.parallel.static import StagedProgram
from unisono.plan.plan import Plan
from unisono.verify.agreement import with_agreement
from unisono.verify.first_divergence import first_parting, guess_fault
from unisono.verify.float64 import InDouble
from unisono.verify.follow import Follower
from unisono.verify.on_mesh import PREFIX, OnMesh
from unisono.verify.program_divergence import program_parting
from unisono.verify.program_record import made_program, program_record
from unisono.verify.record import Record, batch_of, plain_record, planned_record
from unisono.verify.task import Task, load_task
from unisono.verify.verdict import (
    HALVES,
    TOLERANCE,
    Verdict,
    compared,
    may_be_rounding,
    rounding_of,
    without_rounding,
)

Subject = Plan | OnMesh  # what is proved: a plan, or a program on a mesh
_REFUSED = "unisono.errors.UsageError: "
_PATIENCE = 10.0  # seconds in which all ranks refuse a plan, if they all do


def verify(
    task: Task | str,
    plan: Subject | str,
    ranks: int | None = None,
    backend: str | None = None,
    steps: int = 3,
    dtype: str = "float64",
) -> Verdict:
    """Start the plan's ranks on this machine, train, compare. task: a Task, or `file.py:name`.

    plan: a Plan or its words, or those of a program on a mesh: "program dp=2,mp=4".
    """
    plan = parsed(plan) if isinstance(plan, str) else plan
    plan.fit(plan.world if ranks is None else ranks)
    return verify_all(task, [plan], backend, steps, dtype)[0]


def parsed(text: str) -> Subject:
    return OnMesh.parse(text) if text.startswith(PREFIX) else Plan.parse(text)


def verify_all(
    task: Task | str,
    plans: Sequence[Subject],
    backend: str | None = None,
    steps: int = 3,
    dtype: str = "float64",
    told: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Verify plans that need the same number of ranks; each verdict is told as soon as it is known."""
    sizes = {plan.world for plan in plans}
    if len(sizes) != 1:
        raise UsageError(f"verify_all takes plans for one number of ranks; these need {sorted(sizes)}")
    verdicts: list[Verdict] = []

    def note(verdict: Verdict) -> None:
        verdicts.append(verdict)
        told(verdict)

    while len(verdicts) < len(plans):
        rest = [str(plan) for plan in plans[len(verdicts) :]]
        with tempfile.TemporaryDirectory(prefix="unisono-verify-") as folder:
            try:
                with Follower(Path(folder) / "verdicts", lambda line: note(Verdict.of_json(json.loads(line)))):
                    spawn(_on_rank, sizes.copy().pop(), backend, (task, rest, steps, dtype, folder))
            except LaunchError as error:
                if len(plans) == 1 and _REFUSED not in str(error):
                    raise
                note(_ended(str(plans[len(verdicts)]), str(error)))
    return verdicts


def _ended(plan: str, told: str) -> Verdict:
    """The verdict on a plan whose ranks ended before they came to one."""
    lines = told.strip().splitlines()
    refusals = [line.removeprefix(_REFUSED) for line in lines if line.startswith(_REFUSED)]
    if refusals:
        return Verdict(plan, False, refusal=refusals[-1])
    return Verdict(plan, False, failure=lines[-1] if lines else "the ranks ended")


# ---- on the ranks --------------------------------------------------------------------------------------------------


def _on_rank(task: Task | str, plans: Sequence[str], steps: int, dtype: str, folder: str) -> None:
    torch.set_num_threads(1)
    comm = world.init()
    try:
        loaded = load_task(task) if isinstance(task, str) else task
        plain = _plain(loaded, steps, dtype) if comm.rank == 0 else None
        for number, text in enumerate(plans):
            try:
                verdict = verify_here(comm, loaded, parsed(text), steps, dtype, plain=plain)
            except UsageError as error:
                if not _all_refuse(comm, Path(folder), number):
                    raise
                verdict = Verdict(text, False, refusal=str(error))
            if comm.rank == 0:
                with (Path(folder) / "verdicts").open("a") as file:
                    file.write(json.dumps(verdict.as_json()) + "\n")
            gc.collect()  # trainers hold models in cycles
    finally:
        world.shutdown()


def _all_refuse(comm: Communicator, folder: Path, number: int) -> bool:
    """Whether every rank has refused this plan, so that none waits for another in the middle of it."""
    (folder / f"refused-{number}-{comm.rank}").touch()
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        if all((folder / f"refused-{number}-{rank}").exists() for rank in range(comm.size)):
            return True
        time.sleep(0.01)
    return False


def verify_here(
    comm: Communicator,
    task: Task,
    plan: Subject,
    steps: int = 3,
    dtype: str = "float64",
    prepare: Any = None,
    plain: Record | None = None,
) -> Verdict:
    """verify among ranks that are up already; every rank calls it and gets the verdict.

    plain: the record of the plain model on rank 0, where it is known from another plan.
    """
    planned = _planned(task, plan, steps, dtype, prepare)
    if comm.rank == 0:
        plain = plain or _plain(task, steps, dtype)
    verdict = _judged(comm, plan, plain, planned, dtype)
    if may_be_rounding(verdict, dtype):
        rounding = comm.broadcast_object(rounding_of(plain, dtype) if plain is not None else 0.0)
        quiet = _planned(task, plan, steps, dtype, prepare, rounding)
        still = _plain(task, steps, dtype, rounding) if comm.rank == 0 else None
        verdict = without_rounding(verdict, _judged(comm, plan, still, quiet, dtype))
    if verdict.equivalent:
        return verdict
    if isinstance(plan, OnMesh):
        return replace(verdict, parting=_program_parting(comm, task, plan, dtype, prepare))
    first = _plain(task, 1, dtype)
    parting = first_parting(comm, plan, first.activations, planned.activations, 10 * TOLERANCE[dtype])
    return Verdict(verdict.plan, False, verdict.worst, parting, guess_fault(plan, first, planned))


def _judged(comm: Communicator, plan: Subject, plain: Record | None, planned: Record, dtype: str) -> Verdict:
    """The verdict of rank 0, which has the plain record, on every rank; each adds how far its own copies are off."""
    verdict = comm.broadcast_object(None if plain is None else compared(plan, plain, planned, dtype))
    assert verdict is not None
    return with_agreement(comm, planned, verdict, TOLERANCE[dtype])


def _planned(task: Task, plan: Subject, steps: int, dtype: str, prepare: Any, rounding: float = 0.0) -> Record:
    if isinstance(plan, Plan):
        precision = HALVES.get(dtype, "fp32")
        return planned_record(task, plan, steps, _kept(dtype), prepare=prepare, precision=precision, rounding=rounding)
    if dtype in HALVES:
        raise UsageError(f"a program is proved in float64 or float32, not in {dtype}")
    return program_record(task, plan.mesh(), steps, _kept(dtype), prepare=prepare, rounding=rounding, **plan.options)


def _program_parting(comm: Communicator, task: Task, plan: OnMesh, dtype: str, prepare: Any) -> str:
    program, batch = made_program(task, plan.mesh(), _kept(dtype), **plan.options), batch_of(task, 0, _kept(dtype))
    if isinstance(program, StagedProgram):
        return "the stages of a pipeline are not looked into; try the plan that the marks make: uni.apply_marks"
    if prepare is not None:
        prepare(program)
    with InDouble(_kept(dtype)):
        return program_parting(comm, program, batch, 10 * TOLERANCE[dtype])


def _plain(task: Task, steps: int, dtype: str, rounding: float = 0.0) -> Record:
    return plain_record(task, steps, _kept(dtype), precision=HALVES.get(dtype, "fp32"), rounding=rounding)


def _kept(dtype: str) -> torch.dtype:
    """The dtype of parameters, where `dtype` is that of what is computed."""
    return torch.float32 if dtype in HALVES else getattr(torch, dtype)
