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

# Halves: the dtype of what is computed; parameters, gradients and optimizer state are then float32. Rounding alone
# sends a ReLU, or a sign in Adam, to the other side now and then: so norms are compared, and less is proved.
HALVES = {"bfloat16": "bf16", "float16": "fp16"}
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.2, "float16": 0.05}
LOSS_TOLERANCE = TOLERANCE | {"bfloat16": 1e-2, "float16": 2e-3}
KINDS = ("initial parameters", "loss", "gradients", "parameters", "buffers", "optimizer state")
# A tensor this much smaller than the largest of its kind is zero but for rounding; its relative deviation says nothing.
_NEGLIGIBLE = {"float64": 1e-6, "float32": 1e-6, "bfloat16": 0.05, "float16": 0.05}


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
    kind = torch.float32 if dtype in HALVES else getattr(torch, dtype)
    precision = HALVES.get(dtype, "fp32")
    planned = planned_record(task, plan, steps, kind, prepare=prepare, precision=precision)
    verdict = None
    if comm.rank == 0:
        verdict = _compared(plan, plain_record(task, steps, kind, precision=precision), planned, dtype)
    verdict = comm.broadcast_object(verdict)
    assert verdict is not None
    if verdict.equivalent:
        return verdict
    plain = plain_record(task, 1, kind, precision=precision)
    parting = first_parting(comm, plan, plain.activations, planned.activations, 10 * TOLERANCE[dtype])
    guess = guess_fault(plan, plain, planned)
    return Verdict(verdict.plan, False, verdict.worst, parting, guess)


def _compared(plan: Plan, plain: Record, planned: Record, dtype: str) -> Verdict:
    worst = [
        _worst("initial parameters", plain.initial, planned.initial, dtype, exact=True),
        _worst("loss", _by_step(plain.losses), _by_step(planned.losses), dtype),
        _worst("gradients", _gradients(plain), _gradients(planned), dtype),
        _worst("parameters", plain.parameters, planned.parameters, dtype),
        _worst("buffers", plain.buffers, planned.buffers, dtype),
        _worst("optimizer state", plain.optimizer, planned.optimizer, dtype),
    ]
    if dtype == "float16":
        worst.append(_worst("loss scale", _by_step(plain.scales), _by_step(planned.scales), dtype, exact=True))
    return Verdict(str(plan), all(each.deviation <= _allowed(each.kind, dtype) for each in worst), worst)


def _allowed(kind: str, dtype: str) -> float:
    if kind in ("initial parameters", "loss scale"):
        return 0.0
    return (LOSS_TOLERANCE if kind == "loss" else TOLERANCE)[dtype]


def _by_step(numbers: list[float]) -> dict[str, torch.Tensor]:
    return {f"step {step}": torch.tensor(number, dtype=torch.float64) for step, number in enumerate(numbers)}


def _gradients(record: Record) -> dict[str, torch.Tensor]:
    steps = enumerate(record.gradients)
    return {f"{name} (step {step})": gradient for step, named in steps for name, gradient in named.items()}


def _worst(
    kind: str,
    plain: dict[str, torch.Tensor],
    planned: dict[str, torch.Tensor],
    dtype: str,
    exact: bool = False,
) -> Worst:
    missing = sorted(set(plain) ^ set(planned))
    if missing:
        where = "under the plan" if missing[0] in plain else "on one device"
        return Worst(kind, float("inf"), f"{missing[0]} is missing {where}", len(plain))
    scales: dict[str, float] = {}  # of an optimizer's states of each name, of other kinds altogether
    for key, reference in plain.items():
        if reference.numel():
            scales[_family(key)] = max(scales.get(_family(key), 0.0), float(reference.abs().max()))
    worst, name = 0.0, ""
    for key, reference in plain.items():
        if exact:
            deviation = (
                0.0 if torch.equal(reference, planned[key]) else max(_deviation(reference, planned[key], 0), 1e-300)
            )
        else:
            floor = _NEGLIGIBLE[dtype] * scales.get(_family(key), 0.0)
            deviation = _deviation(reference, planned[key], floor, of_norms=dtype in HALVES)
        if deviation > worst:
            worst, name = deviation, key
    return Worst(kind, worst, name, len(plain))


def _family(key: str) -> str:
    return key.partition(":")[2]


def _deviation(reference: torch.Tensor, got: torch.Tensor, floor: float, of_norms: bool = False) -> float:
    """The largest difference beside the largest value; with `of_norms`, norm beside norm."""
    if reference.shape != got.shape:
        return float("inf")
    if not reference.numel():
        return 0.0
    reference, got = reference.double(), got.double()
    difference = reference - got
    if not bool(difference.isfinite().all()):
        return 0.0 if torch.equal(reference, got) else float("inf")
    if of_norms:
        return float(difference.norm() / max(float(reference.norm()), floor * reference.numel() ** 0.5, 1e-300))
    return float(difference.abs().max() / max(float(reference.abs().max()), floor, 1e-300))
