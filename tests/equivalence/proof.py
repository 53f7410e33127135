"""verify among the ranks of a pool; what is the same for all plans of a task is done once a pool."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel import apply
from unisono.parallel.tensor.head_width import HeadWidth
from unisono.plan.plan import Plan
from unisono.verify.compare import HALF_DTYPES, Verdict
from unisono.verify.training_record import TrainingRecord, plain_record
from unisono.verify.verify import verify_here

_plain: dict[tuple[Any, ...], TrainingRecord] = {}
_seen: set[tuple[Any, ...]] = set()
_widths: dict[tuple[Any, ...], Any] = {}


def prove(
    comm: Communicator,
    module: str,
    task: str,
    plan: str,
    dtype: str = "float64",
    prepare: Callable[[Any], None] | None = None,
) -> Verdict:
    steps, parsed = 2, Plan.parse(plan)
    found = getattr(importlib.import_module(f"tests.equivalence.{module}"), task)
    key = (module, task, dtype)
    if comm.rank == 0 and key not in _plain:
        kept = torch.float64 if dtype == "float64" else torch.float32
        _plain[key] = plain_record(found, steps, kept, precision=HALF_DTYPES.get(dtype, "fp32"))
    with _looking_ahead_once(key, parsed):
        return verify_here(comm, found, parsed, steps, dtype, prepare, _plain.get(key))


@contextlib.contextmanager
def _looking_ahead_once(task: tuple[Any, ...], plan: Plan) -> Iterator[None]:
    """Before ranks communicate, meta copies of the model are run: for the loss, in a pipeline's stages, and for the
    width of heads. What that gives depends on the task and on these parts of the plan only."""
    pipeline = (plan.pp, plan.schedule, plan.chunks, plan.microbatches, plan.dp)
    looks = {"require_fitting_loss": (), "rehearse": pipeline}
    originals = {name: getattr(apply, name) for name in looks}

    def once(name: str, key: tuple[Any, ...]) -> Callable[..., None]:
        def look(*args: Any) -> None:
            if key not in _seen:
                originals[name](*args)
                _seen.add(key)

        return look

    def widths(head_width: HeadWidth, inputs: Any) -> Any:
        if task not in _widths:
            _widths[task] = find_widths(head_width, inputs)
        return _widths[task]

    find_widths = HeadWidth._full_widths
    HeadWidth._full_widths = widths  # type: ignore[method-assign]
    for name, parts in looks.items():
        setattr(apply, name, once(name, (name, *task, *parts)))
    try:
        yield
    finally:
        HeadWidth._full_widths = find_widths  # type: ignore[method-assign]
        for name, original in originals.items():
            setattr(apply, name, original)


def refused(comm: Communicator, module: str, task: str, plan: str) -> str:
    """Why a plan is refused, on every rank: none is left waiting."""
    try:
        prove(comm, module, task, plan)
    except UsageError as error:
        comm.barrier()
        return str(error)
    raise AssertionError(f"plan {plan} was expected to be refused for {task}")
