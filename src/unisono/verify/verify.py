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
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import world
from unisono.comm.rendezvous.launcher_env import find_rank_info
from unisono.errors import LaunchError, UsageError
from unisono.launch import environment
from unisono.launch.spawn import spawn
from unisono.parallel.static.to_static import StagedProgram
from unisono.parallel.task import Task, load_task
from unisono.plan.plan import Plan
from unisono.verify.agreement import with_agreement
from unisono.verify.ending import REFUSAL, Ending, Endings, OneDeviceError, in_float32
from unisono.verify.first_divergence import first_parting, guess_fault
from unisono.verify.float64 import InDouble
from unisono.verify.follow import Follower
from unisono.verify.on_mesh import PREFIX, OnMesh
from unisono.verify.program_divergence import program_parting
from unisono.verify.program_record import made_program, program_record
from unisono.verify.record import Record, batch_of, plain_record, planned_record
from unisono.verify.reference import Reference
from unisono.verify.verdict import (
    HALVES,
    ROUNDING,
    TOLERANCE,
    Verdict,
    compared,
    may_be_rounding,
    may_be_sensitive,
    rounding_of,
    within_sensitivity,
    without_rounding,
)

Subject = Plan | OnMesh  # what is proved: a plan, or a program on a mesh
_REFUSED = "unisono.errors.UsageError: "
_TOGETHER = 10.0  # seconds in which all ranks refuse a plan, if they all do
TIMEOUT = 600.0  # seconds that a collective of a planned step may block before the plan counts as failed


def verify(
    task: Task | str,
    plan: Subject | str,
    ranks: int | None = None,
    backend: str | None = None,
    steps: int = 3,
    dtype: str = "float64",
    timeout: float | None = None,
) -> Verdict:
    """Start the plan's ranks on this machine, train, compare. task: a Task, or `file.py:name`.

    plan: a Plan or its words, or those of a program on a mesh: "program dp=2,mp=4". timeout: seconds that a collective
    may block; by default what UNISONO_TIMEOUT says, else 600. A plan that is refused or that fails is a verdict too.
    """
    plan = parsed(plan) if isinstance(plan, str) else plan
    plan.fit(plan.world if ranks is None else ranks)
    return verify_all(task, [plan], backend, steps, dtype, timeout=timeout)[0]


def parsed(text: str) -> Subject:
    return OnMesh.parse(text) if text.startswith(PREFIX) else Plan.parse(text)


def verify_all(
    task: Task | str,
    plans: Sequence[Subject],
    backend: str | None = None,
    steps: int = 3,
    dtype: str = "float64",
    told: Callable[[Verdict], None] = lambda verdict: None,
    timeout: float | None = None,
) -> list[Verdict]:
    """Verify plans that need the same number of ranks; `told` gets each verdict as soon as it is known.

    Where the task cannot run in float64 (a kernel has none), it is proved in float32, and the verdict's note says so.
    """
    sizes = {plan.world for plan in plans}
    if len(sizes) != 1:
        raise UsageError(f"verify_all takes plans for one number of ranks; these need {sorted(sizes)}")
    ranks = sizes.pop()
    verdicts: list[Verdict] = []

    remark = ""

    def note(verdict: Verdict) -> None:
        verdicts.append(replace(verdict, note=remark or verdict.note))
        told(verdicts[-1])

    with tempfile.TemporaryDirectory(prefix="unisono-verify-") as folder:
        while len(verdicts) < len(plans):
            first, rest = len(verdicts), [str(plan) for plan in plans[len(verdicts) :]]
            lines = Path(folder) / f"verdicts-{first}"
            try:
                with Follower(lines, lambda line: note(Verdict.of_json(json.loads(line)))):
                    spawn(_on_rank, ranks, backend, (task, rest, first, steps, dtype, folder, timeout))
            except LaunchError as error:
                if len(verdicts) == len(plans):
                    break  # they failed on their way out
                cause = Endings(Path(folder), len(verdicts)).cause(ranks) or _ending_of(str(error))
                if dtype == "float64" and cause.is_of_float64:
                    dtype, remark = "float32", in_float32(cause)
                    Endings(Path(folder), len(verdicts)).forget()
                    continue
                note(_ended(str(plans[len(verdicts)]), cause))
    return verdicts


def _ended(plan: str, ending: Ending) -> Verdict:
    """The verdict on a plan that came to none."""
    if ending.kind == REFUSAL:
        return Verdict(plan, False, refusal=ending.text)
    return Verdict(plan, False, failure=ending.text)


def _ending_of(told: str) -> Ending:
    """Where no rank has left a word of its own: killed, hung, or failed before the first plan."""
    lines = told.strip().splitlines() or ["the ranks ended"]
    refusals = [line.removeprefix(_REFUSED) for line in lines if line.startswith(_REFUSED)]
    if refusals:
        return Ending(REFUSAL, refusals[-1])
    return Ending("", lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}")


# ---- on the ranks --------------------------------------------------------------------------------------------------


def _on_rank(
    task: Task | str, plans: Sequence[str], first: int, steps: int, dtype: str, folder: str, timeout: float | None
) -> None:
    torch.set_num_threads(1)
    reference = Reference(Path(folder) / dtype, partial(_plain_of, task, steps, dtype))
    if find_rank_info().rank == 0:
        reference.start()
    comm = world.init(timeout=_timeout(timeout))
    try:
        loaded = load_task(task) if isinstance(task, str) else task
        for number, text in enumerate(plans, first):
            try:
                verdict = verify_here(comm, loaded, parsed(text), steps, dtype, reference=reference)
            except Exception as error:
                verdict = _ended(text, _ending_of_all(comm, error, reference, Endings(Path(folder), number)))
            if comm.rank == 0:
                with (Path(folder) / f"verdicts-{first}").open("a") as file:
                    file.write(json.dumps(verdict.as_json()) + "\n")
            gc.collect()  # trainers hold models in cycles
    finally:
        reference.stop()
        world.shutdown()


def _plain_of(task: Task | str, steps: int, dtype: str, rounding: float, noise: float) -> Record:
    return _plain(load_task(task) if isinstance(task, str) else task, steps, dtype, rounding, noise)


def _timeout(given: float | None) -> float | None:
    return TIMEOUT if given is None and environment.TIMEOUT not in os.environ else given


def _ending_of_all(comm: Communicator, error: Exception, reference: Reference, endings: Endings) -> Ending:
    """The ending of this plan on all ranks, where they ended in step; else raises the error, which ends them all."""
    if not isinstance(error, UsageError | OneDeviceError):
        error = reference.failure(_TOGETHER) or error  # the task itself is at fault
    mine = Ending.of(error)
    endings.note(comm.rank, mine)
    if mine.is_of_float64:
        raise error  # all are tried anew in float32
    if isinstance(error, UsageError | OneDeviceError) and endings.are_alike(mine, comm.size, _TOGETHER):
        return endings.cause(comm.size) or mine
    raise error


def verify_here(
    comm: Communicator,
    task: Task,
    plan: Subject,
    steps: int = 3,
    dtype: str = "float64",
    prepare: Any = None,
    plain: Record | None = None,
    reference: Reference | None = None,
) -> Verdict:
    """verify among ranks that are up already; every rank calls it and gets the verdict.

    plain: the record of the plain model on rank 0, where it is known from another plan. reference: the process that
    makes such records; by default ranks make them, each as if it were alone.
    """
    one_device = reference or _Own(task, steps, dtype)
    planned = _planned(task, plan, steps, dtype, prepare)
    verdict = _judged(comm, plan, one_device, 0.0, planned, dtype, plain)
    rounding = 0.0
    if may_be_rounding(verdict, dtype):
        rounding = comm.broadcast_object(rounding_of(plain or one_device.record(), dtype) if comm.rank == 0 else 0.0)
        quiet = _planned(task, plan, steps, dtype, prepare, rounding)
        verdict = without_rounding(verdict, _judged(comm, plan, one_device, rounding, quiet, dtype))
    if may_be_sensitive(verdict, dtype):
        verdict = _beside_rounding(comm, verdict, one_device, dtype, rounding, plain if not rounding else None)
    if verdict.equivalent:
        return verdict
    if isinstance(plan, OnMesh):
        return replace(verdict, parting=_program_parting(comm, task, plan, dtype, prepare))
    first = plain or one_device.record()
    limit = 10 * TOLERANCE[dtype]
    parting = first_parting(comm, plan, first.activations, planned.activations, limit, (first, planned))
    return replace(verdict, parting=parting, guess=guess_fault(plan, first, planned))


def _beside_rounding(
    comm: Communicator,
    verdict: Verdict,
    reference: Reference | _Own,
    dtype: str,
    rounding: float,
    plain: Record | None,
) -> Verdict:
    """The verdict beside what rounding does to the job on one device; every rank calls it.

    rounding: that of the runs that the verdict is on (see plain_record)."""
    reference.wait(rounding)
    reference.wait(rounding, noise=ROUNDING)
    if comm.rank == 0:
        first = plain or reference.record(rounding)
        verdict = within_sensitivity(verdict, first, reference.record(rounding, noise=ROUNDING), dtype)
    return comm.broadcast_object(verdict)


class _Own:
    """The reference of ranks that have no process for it."""

    def __init__(self, task: Task, steps: int, dtype: str) -> None:
        self._compute = cache(partial(_plain, task, steps, dtype))

    def wait(self, rounding: float = 0.0, noise: float = 0.0) -> None:
        pass

    def record(self, rounding: float = 0.0, noise: float = 0.0) -> Record:
        try:
            return self._compute(rounding, noise)
        except Exception as error:
            raise Ending.of(error).as_error() from error


def _judged(
    comm: Communicator,
    plan: Subject,
    reference: Reference | _Own,
    rounding: float,
    planned: Record,
    dtype: str,
    plain: Record | None = None,
) -> Verdict:
    """The verdict of rank 0, which reads the plain record, on every rank; each adds how far its own copies are off."""
    reference.wait(rounding)
    found: Verdict | UsageError | OneDeviceError | None = None
    if comm.rank == 0:
        try:
            found = compared(plan, plain or reference.record(rounding), planned, dtype)
        except (UsageError, OneDeviceError) as error:
            found = error
    found = comm.broadcast_object(found)
    if isinstance(found, Exception):
        raise found
    assert found is not None
    return comm.broadcast_object(with_agreement(comm, planned, found, TOLERANCE[dtype]))


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


def _plain(task: Task, steps: int, dtype: str, rounding: float = 0.0, noise: float = 0.0) -> Record:
    precision = HALVES.get(dtype, "fp32")
    return plain_record(task, steps, _kept(dtype), precision=precision, rounding=rounding, noise=noise)


def _kept(dtype: str) -> torch.dtype:
    """The dtype of parameters, where `dtype` is that of what is computed."""
    return torch.float32 if dtype in HALVES else getattr(torch, dtype)
