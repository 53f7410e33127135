"""A rehearsal: all stages of a pipeline run on one rank, without values, before any ranks communicate.

A stage that finds a model impossible to split is one rank's stage; the others would wait for its message. So every rank
first plays all of them, on torch's "meta" device, where tensors have shapes and no numbers, and all refuse alike. A
model that needs numbers is played with a copy of its own, if it is small; else the first step shows it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from unisono.errors import UsageError
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.blocks import find_blocks
from unisono.parallel.context.context import hidden_states
from unisono.parallel.expert.even_experts import evenly_visited
from unisono.parallel.layout import full_numel
from unisono.parallel.meta.materialize_on_read import MaterializeOnRead
from unisono.parallel.meta.meta_tensors import meta_copy, realised_copy, to_meta
from unisono.parallel.meta.shadow import OnMeta
from unisono.parallel.meta.shapes import KnownShapes
from unisono.parallel.pipeline.message import MessageForm
from unisono.parallel.pipeline.parameter_usage import ParameterUsage, Users, by_example, left_as_it_was
from unisono.parallel.pipeline.skips import Skips
from unisono.parallel.pipeline.split import StageSplit, require_stages, split
from unisono.parallel.pipeline.stage import Stage, StageOutput
from unisono.plan.schedules.schedule import Schedule

_SMALL = 5 * 10**7  # parameters of a model of which a copy is made


def rehearse(model: nn.Module, schedule: Schedule, inputs: Any) -> bool:
    """UsageError where one of the stages could not run on a microbatch of such inputs; False where it takes values."""
    with contextlib.ExitStack() as experts:
        experts.enter_context(contextlib.suppress(_NeedsNumbers))
        experts.enter_context(no_side_effects(model))
        experts.enter_context(torch.device("meta"))
        experts.enter_context(KnownShapes())
        inputs = to_meta(inputs)
        watched = meta_copy(model)
        with evenly_visited(watched):
            usage = _played(lambda: by_example(watched, require_stages(watched, schedule), inputs))
        splits = [
            _played(lambda rank=rank: _split_copy(watched, usage, schedule, rank)) for rank in range(schedule.ranks)
        ]
        for part in splits:
            experts.enter_context(evenly_visited(part.model))
        stages = sorted((stage for part in splits for stage in part.stages), key=lambda stage: stage.number)
        message: Sequence[torch.Tensor] = ()
        form: MessageForm | None = None
        for stage in stages:
            outcome = _played(lambda stage=stage, reported=message, form=form: stage.forward(inputs, reported, form))
            message = [torch.empty_like(tensor, requires_grad=tensor.requires_grad) for tensor in outcome.tensors]
            form = outcome.form
        return True
    return False


def rehearse_with_values(model: nn.Module, schedule: Schedule, inputs: Any) -> None:
    """The same with values, of a model that is small; of a deferred-init model, with a few tensors' at a time."""
    if sum(map(full_numel, model.parameters())) > _SMALL:
        return
    with left_as_it_was(model), contextlib.suppress(_NeedsNumbers), torch.no_grad():
        full, values = _played(lambda: _with_values(model, inputs))
        with values:
            usage: ParameterUsage = _played(lambda: by_example(full, require_stages(full, schedule), inputs))
        message: list[torch.Tensor] = []
        form: MessageForm | None = None
        for number, rank in enumerate(schedule.placement):
            copy, values = _with_values(model, inputs)
            part = split(copy, schedule, rank, usage=usage.of_copy(full, copy))
            (stage,) = (each for each in part.stages if each.number == number)
            with values:
                outcome = _played(lambda stage=stage, reported=message, form=form: _run(stage, inputs, reported, form))
            message = outcome.tensors
            form = outcome.form


def _with_values(model: nn.Module, inputs: Any) -> tuple[nn.Module, contextlib.AbstractContextManager[Any]]:
    """A copy, and a block in which it has values."""
    if any(parameter.is_meta for parameter in model.parameters()):
        copy = meta_copy(model)
        return copy, MaterializeOnRead(model, copy, device_of(inputs))
    full = realised_copy(model)
    assert full is not None
    return full, contextlib.nullcontext()


def _run(stage: Stage, inputs: Any, message: Sequence[torch.Tensor], form: MessageForm | None) -> StageOutput:
    try:
        return stage.forward(inputs, message, form)
    except (AttributeError, LookupError, NameError, TypeError) as error:
        raise UsageError(
            f"pipeline: stage {stage.number} of {type(stage.model).__name__} fails without the blocks of the other "
            f"stages ({type(error).__name__}: {' '.join(str(error).split())}); let blocks hand on all that they "
            "compute as arguments and results, or use pp=1"
        ) from error


def _split_copy(watched: nn.Module, usage: ParameterUsage, schedule: Schedule, rank: int) -> StageSplit:
    """Of a copy, as splitting a model changes it; the parameter usage is the same for all ranks."""
    copy = meta_copy(watched)
    return split(copy, schedule, rank, usage=usage.of_copy(watched, copy))


@dataclass(frozen=True)
class Rehearsal:
    """What a run of a meta model shows of it."""

    users: Users  # the segments of the forward that use each parameter and buffer
    length: int | None  # of the sequences that enter the first block, where they are such
    skips: Skips


def rehearsed(model: nn.Module, schedule: Schedule, inputs: Any) -> Rehearsal | None:
    """Run a deferred-init model on such inputs: without numbers, or, where it needs some, with a few tensors' at a
    time.

    None where neither can be done.
    """
    shown = rehearsed_without_values(model, schedule, inputs)
    if shown is not None:
        return shown
    copy = meta_copy(model)
    with contextlib.suppress(_NeedsNumbers), no_side_effects(model), MaterializeOnRead(model, copy, device_of(inputs)):
        return _rehearsed(copy, schedule, inputs)
    return None


def rehearsed_without_values(model: nn.Module, schedule: Schedule, inputs: Any) -> Rehearsal | None:
    """The same of any meta model; None where it needs numbers that come of its parameters."""
    copy = meta_copy(model)
    with (
        contextlib.suppress(_NeedsNumbers),
        no_side_effects(model),
        KnownShapes(),
        OnMeta(device_of(inputs)),
        evenly_visited(copy),
    ):
        return _rehearsed(copy, schedule, inputs)
    return None


def device_of(inputs: Any) -> torch.device:
    devices = [leaf.device for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    return devices[0] if devices else torch.device("cpu")


def _rehearsed(copy: nn.Module, schedule: Schedule, inputs: Any) -> Rehearsal:
    with _lengths_entering(copy) as lengths:
        usage: ParameterUsage = _played(lambda: by_example(copy, require_stages(copy, schedule), inputs))
    return Rehearsal(usage.by_name(copy), lengths[0] if lengths else None, usage.skips)


@contextlib.contextmanager
def _lengths_entering(model: nn.Module) -> Iterator[list[int]]:
    """The lengths of the sequences that come to the first of the model's repeated blocks in the block."""
    lengths: list[int] = []

    def look(_: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = hidden_states((args, kwargs))
        if hidden is not None:
            lengths.append(hidden.shape[1])

    try:
        first = find_blocks(model).modules[0]
    except UsageError:
        yield lengths  # blocks of several classes: there is no cp of those
        return
    hook = first.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield lengths
    finally:
        hook.remove()


class _NeedsNumbers(Exception):
    """The model, or a torch operation in it, cannot do with shapes alone."""


def _played(act: Any) -> Any:
    try:
        return act()
    except UsageError:
        raise
    except Exception as error:
        raise _NeedsNumbers from error
