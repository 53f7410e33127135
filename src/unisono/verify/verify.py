"""verify: the proof that a plan gives the result of one device, or the first module where it does not.

A task is trained for a few steps on one device and under the plan, from the same seed and batches. Initial parameters
must be equal bit for bit; losses, gradients, parameters, buffers and optimizer states must agree to a tolerance that
leaves room for rounding only: in float64, what differs by more is a bug. Of a task with a half precision, float64 also
has the roundings of parameters (weights that are gathered in halves, master weights, rounded steps), to the same values
on one device and under the plan; what halves do to activations is compared with --dtype bfloat16 or float16.

Many plans are tried by the same ranks, one after the other, against one run of the plain model. A plan that is refused
by all ranks leaves them as they were; one that fails on some ends them, and the rest is tried by new ones.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import world
from unisono.comm.rendezvous.launcher_env import find_rank_info
from unisono.errors import LaunchError, UsageError
from unisono.launch import environment
from unisono.launch.spawn import spawn
from unisono.parallel.precision import Precision
from unisono.parallel.static.to_static import StagedProgram
from unisono.parallel.task import Task, load_task
from unisono.plan.plan import Plan
from unisono.simulate.sketch import without_memory
from unisono.verify.compare import (
    HALF_DTYPES,
    ROUNDING,
    TOLERANCE,
    Verdict,
    compared,
    may_be_rounding,
    may_be_sensitive,
    rounding_of,
    with_agreement,
    within_sensitivity,
    without_rounding,
)
from unisono.verify.first_divergence import find_first_divergence, guess_fault
from unisono.verify.float64 import Float64Mode
from unisono.verify.mesh_program import PREFIX, ProgramSpec, made_program, program_divergence, program_record
from unisono.verify.reference import ReferenceProcess
from unisono.verify.run_errors import REFUSAL, OneDeviceError, RankErrors, RunError, in_float32
from unisono.verify.training_record import TrainingRecord, batch_of, plain_record, planned_record

Subject = Plan | ProgramSpec  # what is proved: a plan, or a program on a mesh
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

    plan: a Plan or its text, or that of a program on a mesh: "program dp=2,mp=4". timeout: seconds that a collective
    may block; by default UNISONO_TIMEOUT, else 600. A plan that is refused or that fails is a verdict too.
    """
    plan = parsed(plan) if isinstance(plan, str) else plan
    plan.fit(plan.world if ranks is None else ranks)
    return verify_all(task, [plan], backend, steps, dtype, timeout=timeout)[0]


def parsed(text: str) -> Subject:
    return ProgramSpec.parse(text) if text.startswith(PREFIX) else Plan.parse(text)


def verify_all(
    task: Task | str,
    plans: Sequence[Subject],
    backend: str | None = None,
    steps: int = 3,
    dtype: str = "float64",
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
    timeout: float | None = None,
) -> list[Verdict]:
    """Verify plans that need the same number of ranks; `on_verdict` gets each verdict as soon as it is known.

    Where the task cannot run in float64 (a kernel has none), it is proved in float32, which is in the verdict's note.
    """
    sizes = {plan.world for plan in plans}
    if len(sizes) != 1:
        raise UsageError(f"verify_all takes plans for one number of ranks; these need {sorted(sizes)}")
    ranks = sizes.pop()
    verdicts: list[Verdict] = []

    remark = ""

    def note(verdict: Verdict) -> None:
        verdicts.append(replace(verdict, note=remark or verdict.note))
        on_verdict(verdicts[-1])

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
                cause = RankErrors(Path(folder), len(verdicts)).cause(ranks) or _error_from(str(error))
                if dtype == "float64" and cause.is_of_float64:
                    dtype, remark = "float32", in_float32(cause)
                    RankErrors(Path(folder), len(verdicts)).forget()
                    continue
                note(_without_verdict(str(plans[len(verdicts)]), cause))
    return verdicts


def _without_verdict(plan: str, run_error: RunError) -> Verdict:
    """The verdict on a plan that came to none."""
    if run_error.kind == REFUSAL:
        return Verdict(plan, False, refusal=run_error.text)
    return Verdict(plan, False, failure=run_error.text)


def _error_from(reported: str) -> RunError:
    """The error where no rank has written one: killed, hung, or failed before the first plan."""
    lines = reported.strip().splitlines() or ["the ranks ended"]
    refusals = [line.removeprefix(_REFUSED) for line in lines if line.startswith(_REFUSED)]
    if refusals:
        return RunError(REFUSAL, refusals[-1])
    return RunError("", lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}")


# ---- on the ranks --------------------------------------------------------------------------------------------------


def _on_rank(
    task: Task | str, plans: Sequence[str], first: int, steps: int, dtype: str, folder: str, timeout: float | None
) -> None:
    torch.set_num_threads(1)
    reference = ReferenceProcess(Path(folder) / dtype, partial(_plain_of, task, steps, dtype))
    if find_rank_info().rank == 0:
        reference.start()
    comm = world.init(timeout=_timeout(timeout))
    try:
        loaded = load_task(task) if isinstance(task, str) else task
        for number, text in enumerate(plans, first):
            try:
                verdict = verify_here(comm, loaded, parsed(text), steps, dtype, reference=reference)
            except Exception as error:
                verdict = _without_verdict(
                    text, _error_of_all(comm, error, reference, RankErrors(Path(folder), number))
                )
            if comm.rank == 0:
                with (Path(folder) / f"verdicts-{first}").open("a") as file:
                    file.write(json.dumps(verdict.as_json()) + "\n")
            gc.collect()  # trainers hold models in cycles
    finally:
        reference.stop()
        world.shutdown()


def _plain_of(task: Task | str, steps: int, dtype: str, rounding: float, noise: float) -> TrainingRecord:
    return _plain(load_task(task) if isinstance(task, str) else task, steps, dtype, rounding, noise)


def _timeout(given: float | None) -> float | None:
    return TIMEOUT if given is None and environment.TIMEOUT not in os.environ else given


def _error_of_all(
    comm: Communicator, error: Exception, reference: ReferenceProcess, rank_errors: RankErrors
) -> RunError:
    """The error of this plan on all ranks, if all have failed alike; else raises the error, which ends them all."""
    if not isinstance(error, UsageError | OneDeviceError):
        error = reference.failure(_TOGETHER) or error  # the task itself is at fault
    mine = RunError.of(error)
    rank_errors.note(comm.rank, mine)
    if mine.is_of_float64:
        raise error  # all are tried again in float32
    if isinstance(error, UsageError | OneDeviceError) and rank_errors.are_alike(mine, comm.size, _TOGETHER):
        return rank_errors.cause(comm.size) or mine
    raise error


def verify_here(
    comm: Communicator,
    task: Task,
    plan: Subject,
    steps: int = 3,
    dtype: str = "float64",
    prepare: Any = None,
    plain: TrainingRecord | None = None,
    reference: ReferenceProcess | None = None,
) -> Verdict:
    """verify among ranks that are up already; every rank calls it and gets the verdict.

    plain: the record of the plain model on rank 0, where it is known from another plan. reference: the process that
    makes such records; by default ranks make them, each as if it were alone.
    """
    one_device = reference or _LocalReference(task, steps, dtype)
    planned = _planned(task, plan, steps, dtype, prepare)
    verdict = _judged(comm, plan, one_device, 0.0, planned, dtype, plain)
    rounding = 0.0
    if may_be_rounding(verdict, dtype):
        rounding = comm.broadcast_object(
            rounding_of(plain or one_device.record(), dtype) if comm.rank == 0 else 0.0, only_data=True
        )
        quiet = _planned(task, plan, steps, dtype, prepare, rounding)
        verdict = without_rounding(verdict, _judged(comm, plan, one_device, rounding, quiet, dtype))
    if may_be_sensitive(verdict, dtype):
        verdict = _beside_rounding(comm, verdict, one_device, dtype, rounding, plain if not rounding else None)
    if verdict.equivalent:
        return verdict
    if isinstance(plan, ProgramSpec):
        return replace(verdict, first_divergence=_program_divergence(comm, task, plan, dtype, prepare))
    first = plain or one_device.record()
    limit = 10 * TOLERANCE[dtype]
    first_divergence = find_first_divergence(
        comm, plan, first.activations, planned.activations, limit, (first, planned)
    )
    return replace(verdict, first_divergence=first_divergence, guess=guess_fault(plan, first, planned))


def _beside_rounding(
    comm: Communicator,
    verdict: Verdict,
    reference: ReferenceProcess | _LocalReference,
    dtype: str,
    rounding: float,
    plain: TrainingRecord | None,
) -> Verdict:
    """The verdict beside what rounding does to the job on one device; every rank calls it.

    rounding: that of the runs that the verdict is on (see plain_record)."""
    reference.wait(rounding)
    reference.wait(rounding, noise=ROUNDING)
    if comm.rank == 0:
        first = plain or reference.record(rounding)
        verdict = within_sensitivity(verdict, first, reference.record(rounding, noise=ROUNDING), dtype)
    return comm.broadcast_object(verdict, only_data=True)


class _LocalReference:
    """The reference of ranks that have no process for it."""

    def __init__(self, task: Task, steps: int, dtype: str) -> None:
        self._compute = cache(partial(_plain, task, steps, dtype))

    def wait(self, rounding: float = 0.0, noise: float = 0.0) -> None:
        pass

    def record(self, rounding: float = 0.0, noise: float = 0.0) -> TrainingRecord:
        try:
            return self._compute(rounding, noise)
        except Exception as error:
            raise RunError.of(error).as_error() from error


def _judged(
    comm: Communicator,
    plan: Subject,
    reference: ReferenceProcess | _LocalReference,
    rounding: float,
    planned: TrainingRecord,
    dtype: str,
    plain: TrainingRecord | None = None,
) -> Verdict:
    """The verdict of rank 0, which reads the plain record, on every rank; each adds how far its own copies are off."""
    reference.wait(rounding)
    found: Verdict | tuple[bool, str] | None = None
    if comm.rank == 0:
        try:
            found = compared(plan, plain or reference.record(rounding), planned, dtype)
        except (UsageError, OneDeviceError) as error:
            found = isinstance(error, OneDeviceError), str(error)
    found = comm.broadcast_object(found, only_data=True)
    if isinstance(found, tuple):
        is_of_one_device, reported = found
        raise OneDeviceError(reported) if is_of_one_device else UsageError(reported)
    assert found is not None
    return comm.broadcast_object(with_agreement(comm, planned, found, TOLERANCE[dtype]), only_data=True)


def _planned(task: Task, plan: Subject, steps: int, dtype: str, prepare: Any, rounding: float = 0.0) -> TrainingRecord:
    if isinstance(plan, Plan):
        precision = _precision(task, dtype)
        return planned_record(task, plan, steps, _kept(dtype), prepare=prepare, precision=precision, rounding=rounding)
    if dtype in HALF_DTYPES:
        raise UsageError(f"a program is proved in float64 or float32, not in {dtype}")
    return program_record(task, plan.mesh(), steps, _kept(dtype), prepare=prepare, rounding=rounding, **plan.options)


def _program_divergence(comm: Communicator, task: Task, plan: ProgramSpec, dtype: str, prepare: Any) -> str:
    program, batch = made_program(task, plan.mesh(), _kept(dtype), **plan.options), batch_of(task, 0, _kept(dtype))
    if isinstance(program, StagedProgram):
        return "the stages of a pipeline are not looked into; try the plan that the marks make: uni.apply_marks"
    if prepare is not None:
        prepare(program)
    with Float64Mode(_kept(dtype)):
        return program_divergence(comm, program, batch, 10 * TOLERANCE[dtype])


def _plain(task: Task, steps: int, dtype: str, rounding: float = 0.0, noise: float = 0.0) -> TrainingRecord:
    precision = _precision(task, dtype)
    return plain_record(task, steps, _kept(dtype), precision=precision, rounding=rounding, noise=noise)


def _precision(task: Task, dtype: str) -> Precision:
    """Halves for real; else, in float64 or float32, the roundings of parameters that the task's precision makes."""
    own = Precision.of(task.precision)
    if dtype not in HALF_DTYPES:
        return own if own.half is None else own.emulated(without_memory(task))
    return Precision(HALF_DTYPES[dtype], gather=own.gather, reduce=own.reduce)


def _kept(dtype: str) -> torch.dtype:
    """The dtype of parameters, where `dtype` is that of what is computed."""
    return torch.float32 if dtype in HALF_DTYPES else getattr(torch, dtype)


# ---- verdicts as they come -------------------------------------------------------------------------------------------


_PAUSE = 0.1  # seconds between looks


class Follower:
    """While open, calls `read` with each line that is added to the file; at the end with those that are left."""

    def __init__(self, path: Path, read: Callable[[str], None]) -> None:
        self._path = path
        self._read = read
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._error: BaseException | None = None

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _follow(self) -> None:
        # Until the first line comes this thread takes no lock: ranks are forked meanwhile.
        start = 0
        try:
            while True:
                is_last = self._done.wait(_PAUSE)
                full = self._path.read_bytes()[start:] if self._path.exists() else b""
                complete = full[: full.rfind(b"\n") + 1]
                start += len(complete)
                for line in complete.decode().splitlines():
                    self._read(line)
                if is_last:
                    return
        except BaseException as error:
            self._error = error
