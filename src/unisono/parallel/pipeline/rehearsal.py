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
from torch.utils._pytree import tree_leaves

from unisono.errors import UsageError
from unisono.parallel.hollow import hollow, hollow_copy
from unisono.parallel.pipeline.message import Form
from unisono.parallel.pipeline.shadow import Shadow
from unisono.parallel.pipeline.split import Cut, require_stages, split
from unisono.parallel.pipeline.survey import Survey, Users, by_example
from unisono.plan.schedule import Schedule


def rehearse(model: nn.Module, schedule: Schedule, inputs: Any) -> None:
    """UsageError where one of the stages could not run on a microbatch of such inputs."""
    with contextlib.suppress(_NeedsNumbers), torch.device("meta"):
        inputs = hollow(inputs)
        watched = hollow_copy(model)
        survey = _played(lambda: by_example(watched, require_stages(watched, schedule), inputs))
        cuts = [_played(lambda rank=rank: _cut(watched, survey, schedule, rank)) for rank in range(schedule.ranks)]
        stages = sorted((stage for cut in cuts for stage in cut.stages), key=lambda stage: stage.number)
        message: Sequence[torch.Tensor] = ()
        form: Form | None = None
        for stage in stages:
            outcome = _played(lambda stage=stage, told=message, form=form: stage.forward(inputs, told, form))
            message = [torch.empty_like(tensor, requires_grad=tensor.requires_grad) for tensor in outcome.tensors]
            form = outcome.form


def _cut(watched: nn.Module, survey: Survey, schedule: Schedule, rank: int) -> Cut:
    """Of a copy, as cutting a model changes it; the survey is the same for all ranks."""
    copy = hollow_copy(watched)
    return split(copy, schedule, rank, survey=survey.of_copy(watched, copy))


def surveyed(model: nn.Module, schedule: Schedule, inputs: Any) -> Users | None:
    """Which segments of the forward use each parameter and buffer of a hollow model.

    None where the model needs numbers that come of its parameters.
    """
    copy = hollow_copy(model)
    devices = [leaf.device for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    with contextlib.suppress(_NeedsNumbers), Shadow(devices[0] if devices else torch.device("cpu")):
        survey: Survey = _played(lambda: by_example(copy, require_stages(copy, schedule), inputs))
        return survey.by_name(copy)
    return None


class _NeedsNumbers(Exception):
    """The model, or a torch operation in it, cannot do with shapes alone."""


def _played(act: Any) -> Any:
    try:
        return act()
    except UsageError:
        raise
    except Exception as error:
        raise _NeedsNumbers from error
