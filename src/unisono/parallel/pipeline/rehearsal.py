"""A rehearsal: all stages of a pipeline run on one rank, hollow, before any ranks communicate.

A stage that finds a model impossible to cut is one rank's stage; the others would wait for its message. So every rank
first plays all of them, on torch's "meta" device, where tensors have shapes and no numbers, and all refuse alike. A
model that needs numbers cannot be rehearsed: then the first step tells.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.parallel.hollow import hollow, hollow_copy
from unisono.parallel.pipeline.message import Form
from unisono.parallel.pipeline.split import Cut, require_stages, split
from unisono.parallel.pipeline.survey import Survey, by_example
from unisono.plan.schedule import Schedule


def rehearse(model: nn.Module, schedule: Schedule, inputs: Any) -> None:
    """UsageError where one of the stages could not run on a microbatch of such inputs."""
    with contextlib.suppress(_NeedsNumbers), torch.device("meta"):
        inputs = hollow(inputs)
        surveyed = hollow_copy(model)
        survey = _played(lambda: by_example(surveyed, require_stages(surveyed, schedule), inputs))
        cuts = [_played(lambda rank=rank: _cut(surveyed, survey, schedule, rank)) for rank in range(schedule.ranks)]
        stages = sorted((stage for cut in cuts for stage in cut.stages), key=lambda stage: stage.number)
        message: Sequence[torch.Tensor] = ()
        form: Form | None = None
        for stage in stages:
            outcome = _played(lambda stage=stage, told=message, form=form: stage.forward(inputs, told, form))
            message = [torch.empty_like(tensor, requires_grad=tensor.requires_grad) for tensor in outcome.tensors]
            form = outcome.form


def _cut(surveyed: nn.Module, survey: Survey, schedule: Schedule, rank: int) -> Cut:
    """Of a copy, as cutting a model changes it; the survey is the same for all ranks."""
    copy = hollow_copy(surveyed)
    return split(copy, schedule, rank, survey=survey.of_copy(surveyed, copy))


class _NeedsNumbers(Exception):
    """The model, or a torch operation in it, cannot do with shapes alone."""


def _played(act: Any) -> Any:
    try:
        return act()
    except UsageError:
        raise
    except Exception as error:
        raise _NeedsNumbers from error
