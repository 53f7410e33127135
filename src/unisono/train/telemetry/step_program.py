"""StepProgram: the ops and collectives of one step of a run, recorded as it runs, for the report.

The first rank of each pipeline stage records its step (explain/record.py). Rank 0 also writes a page that shows its
step beside the model on one device, which is recorded on the meta device without memory.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import nn

from unisono.explain.plan_program import listing, recorded_on_one_device
from unisono.explain.record import LOSS, Communication, RankRecord, RankRecorder, RecordedCall, RecordedPart, TensorType
from unisono.graph.render.html import as_page
from unisono.graph.render.listing import tensor_text
from unisono.parallel.meta.meta_tensors import meta_copy
from unisono.parallel.trainer import Trainer
from unisono.planner.choice import Job
from unisono.simulate.sketch import without_memory

_MAX_LINES = 5000
_MAX_SHAPES = 4
_ACTIONS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


class StepProgram:
    """Create it before a plan is applied to the job's model, which changes a module in place."""

    def __init__(self, job: Job | None) -> None:
        """job: None on ranks that do not write the page."""
        self.is_recorded = False
        self.record = RankRecord()
        self._job = job
        self._form: nn.Module | None = None  # copy of the module on the meta device
        if job is not None and isinstance(job.model, nn.Module):
            with contextlib.suppress(Exception):  # must not fail the training
                self._form = meta_copy(job.model)

    @contextlib.contextmanager
    def recording(self, trainer: Trainer) -> Iterator[None]:
        """Record the step in the block, on the first rank of each stage."""
        self.is_recorded = True
        coordinate = dict(zip(trainer.mesh.names, trainer.mesh.coordinate(), strict=True))
        if any(index for axis, index in coordinate.items() if axis != "pp"):
            yield
            return
        recorder = RankRecorder(trainer.model)
        with recorder.step(trainer) as self.record:
            yield

    @property
    def lines(self) -> list[dict[str, Any]]:
        """For the report: the communication of all microbatches, and the ops of the first."""
        made = [line for event in self.record.events if (line := _line(event)) is not None]
        return made[:_MAX_LINES]

    def page(self, trainer: Trainer, rank: int) -> str:
        """This rank's step beside the model on one device; "" if that cannot be recorded."""
        if self._job is None or not self.record.events:
            return ""
        job = self._job
        try:
            form = self._form
            if form is not None:
                job = replace(job, model=lambda: copy.deepcopy(form))
            task = job.task()
            serial = recorded_on_one_device(task, trainer.plan, without_memory(task))
            return as_page(listing(serial, self.record, trainer, job.example, rank), f"program of plan {trainer.plan}")
        except Exception as error:
            warnings.warn(
                f"the report has no program page for plan {trainer.plan}: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return ""


def _line(event: RecordedCall | Communication | RecordedPart) -> dict[str, Any] | None:
    if isinstance(event, RecordedPart):
        if event.action is None and not event.microbatch:
            return None
        name = _ACTIONS[event.action.kind] if event.action is not None else "forward and backward"
        stage = {} if event.action is None else {"stage": event.action.stage}
        return {"kind": "part", "name": name, "microbatch": event.microbatch, **stage}
    if isinstance(event, RecordedCall):
        if event.is_internal and not hasattr(F, event.function):
            return None
        kinds = {"kind": "op", "phase": event.phase, "name": event.function, "path": event.path}
        return kinds | {"shape": _shapes(event.outputs)}
    if event.microbatch and event.path != LOSS:
        return None  # like the first microbatch
    shapes = () if event.tensor is None else (event.tensor,)
    size = sum(each.bytes for each in shapes)
    kinds = {"kind": "communication", "phase": event.phase, "name": event.kind, "path": event.path}
    return kinds | {"shape": _shapes(shapes), "ranks": list(event.ranks), "bytes": size}


def _shapes(tensors: tuple[TensorType, ...]) -> str:
    found = [tensor_text(each.dtype, each.shape) for each in tensors]
    return " ".join(found if len(found) <= _MAX_SHAPES else [*found[:_MAX_SHAPES], "..."])
