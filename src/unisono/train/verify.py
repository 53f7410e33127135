"""verify: the proof that a plan gives the result of one device, or the first place where it does not.

A task is trained for a few steps on one device and under the plan, from the same seed and batches. Initial parameters
must be equal bit for bit; losses, gradients, parameters, buffers and optimizer states must agree to a tolerance that
leaves room for rounding only: in float64, what differs by more is a bug.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from unisono.comm import world
from unisono.comm.communicator import Communicator
from unisono.errors import LaunchError
from unisono.launch.spawn import spawn
from unisono.plan.plan import Plan
from unisono.train.parting import first_parting, guess_fault
from unisono.train.record import Record, plain_record, planned_record
from unisono.train.task import Task, load_task

TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
KINDS = ("initial parameters", "loss", "gradients", "parameters", "buffers", "optimizer state")
# A tensor this much smaller than the largest of its kind is zero but for rounding; its relative deviation says nothing.
_NEGLIGIBLE = 1e-6


@dataclass(frozen=True)
class Worst:
    """The largest relative deviation among the tensors of one kind."""

    kind: str
    deviation: float
    name: str  # of the tensor
    compared: int  # tensors of this kind


@dataclass(frozen=True)
class Verdict:
    plan: str
    equivalent: bool
    worst: list[Worst] = field(default_factory=list)
    parting: str = ""  # the first place in forward order where activations part
    guess: str = ""  # what kind of fault it looks like
    refusal: str = ""  # why the plan was refused, before it ran

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def verify(
    task: Task | str,
    plan: Plan | str,
    ranks: int | None = None,
    backend: str | None = None,
    steps: int = 3,
    dtype: str = "float64",
) -> Verdict:
    """Start the plan's ranks on this machine, train, compare. task: a Task, or `file.py:name`."""
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    plan.fit(plan.world if ranks is None else ranks)
    try:
        return spawn(_on_rank, plan.world, backend, (task, str(plan), steps, dtype))[0]
    except LaunchError as error:
        lines = str(error).strip().splitlines()
        refusals = [line for line in lines if line.startswith("unisono.errors.UsageError: ")]
        if not refusals:
            raise
        return Verdict(str(plan), False, refusal=refusals[-1].removeprefix("unisono.errors.UsageError: "))


def _on_rank(task: Task | str, plan: str, steps: int, dtype: str) -> Verdict:
    torch.set_num_threads(1)
    comm = world.init()
    try:
        loaded = load_task(task) if isinstance(task, str) else task
        return verify_here(comm, loaded, Plan.parse(plan), steps, dtype)
    finally:
        world.shutdown()


def verify_here(
    comm: Communicator, task: Task, plan: Plan, steps: int = 3, dtype: str = "float64", prepare: Any = None
) -> Verdict:
    """verify among ranks that are up already; every rank calls it and gets the verdict."""
    kind = getattr(torch, dtype)
    planned = planned_record(task, plan, steps, kind, prepare=prepare)
    verdict = None
    if comm.rank == 0:
        verdict = _compared(plan, plain_record(task, steps, kind), planned, dtype)
    verdict = comm.broadcast_object(verdict)
    assert verdict is not None
    if verdict.equivalent:
        return verdict
    plain = plain_record(task, 1, kind)
    parting = first_parting(comm, plan, plain.activations, planned.activations, 10 * TOLERANCE[dtype])
    guess = guess_fault(plan, plain, planned)
    return Verdict(verdict.plan, False, verdict.worst, parting, guess)


def _compared(plan: Plan, plain: Record, planned: Record, dtype: str) -> Verdict:
    worst = [
        _worst("initial parameters", plain.initial, planned.initial, exact=True),
        _worst("loss", _losses(plain), _losses(planned)),
        _worst("gradients", _gradients(plain), _gradients(planned)),
        _worst("parameters", plain.parameters, planned.parameters),
        _worst("buffers", plain.buffers, planned.buffers),
        _worst("optimizer state", plain.optimizer, planned.optimizer),
    ]
    equal = worst[0].deviation == 0 and all(each.deviation <= TOLERANCE[dtype] for each in worst)
    return Verdict(str(plan), equal, worst)


def _losses(record: Record) -> dict[str, torch.Tensor]:
    return {f"step {step}": torch.tensor(loss, dtype=torch.float64) for step, loss in enumerate(record.losses)}


def _gradients(record: Record) -> dict[str, torch.Tensor]:
    steps = enumerate(record.gradients)
    return {f"{name} (step {step})": gradient for step, named in steps for name, gradient in named.items()}


def _worst(kind: str, plain: dict[str, torch.Tensor], planned: dict[str, torch.Tensor], exact: bool = False) -> Worst:
    missing = sorted(set(plain) ^ set(planned))
    if missing:
        where = "under the plan" if missing[0] in plain else "on one device"
        return Worst(kind, float("inf"), f"{missing[0]} is missing {where}", len(plain))
    scale = max((float(t.abs().max()) for t in plain.values() if t.numel()), default=0.0)
    worst, name = 0.0, ""
    for key, reference in plain.items():
        if exact:
            deviation = (
                0.0 if torch.equal(reference, planned[key]) else max(_deviation(reference, planned[key], 0), 1e-300)
            )
        else:
            deviation = _deviation(reference, planned[key], _NEGLIGIBLE * scale)
        if deviation > worst:
            worst, name = deviation, key
    return Worst(kind, worst, name, len(plain))


def _deviation(reference: torch.Tensor, got: torch.Tensor, floor: float) -> float:
    if reference.shape != got.shape:
        return float("inf")
    if not reference.numel():
        return 0.0
    reference, got = reference.double(), got.double()
    difference = (reference - got).abs().max()
    if not bool(difference.isfinite()):
        return 0.0 if torch.equal(reference, got) else float("inf")
    return float(difference / max(float(reference.abs().max()), floor, 1e-300))
