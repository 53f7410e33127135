"""Cutting a model into the stages of a pipeline.

    found = split(model, schedule("1f1b", ranks=4, microbatches=8), rank, example=inputs)
    found.model                      # the same object, now with only this rank's parameters, under their old names
    PipelineRuntime(found.stages, ...)

The model is an nn.Sequential, whose children are the blocks, or any model with a list of repeated ones, or one whose
children with parameters run one after the other. A rank keeps its part of it; what was built without values is
filled after that (`filling`), and `layers.split_layers` builds only the part.

A parameter belongs to every stage whose segment of the forward uses it (`usage`): that of an embedding to the first,
of a head to the last, and one that is tied between the two to both. It is held where one of its stages is, under all
of its names, and is off-stage everywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from unisono.errors import UsageError
from unisono.parallel.blocks import Blocks, find_blocks, layers_of
from unisono.parallel.layout import full_numel
from unisono.parallel.pipeline.off_stage import OffStage
from unisono.parallel.pipeline.parameter_usage import ParameterUsage, by_example, by_order
from unisono.parallel.pipeline.stage import Stage
from unisono.parallel.pipeline.tied import Tied
from unisono.plan.schedules.schedule import Schedule
from unisono.plan.search.balance import balanced, checked, require_enough

Cost = str | Sequence[float]  # "parameters", "operations", or one number a block
COSTS = ("parameters", "operations")


@dataclass(frozen=True)
class StageSplit:
    """One rank's part of a model."""

    model: nn.Module
    stages: tuple[Stage, ...]  # this rank's, in forward order
    boundaries: tuple[int, ...]  # the first block of every stage of the pipeline
    tied: tuple[Tied, ...]  # parameters that this rank shares with others of the pipeline
    users: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of a parameter here: this rank's stages


def split(
    model: nn.Module,
    schedule: Schedule,
    rank: int,
    *,
    example: Any = None,
    boundaries: Sequence[int] | None = None,
    cost: Cost = "parameters",
    blocks: str | None = None,
    usage: ParameterUsage | None = None,
) -> StageSplit:
    """Keep this rank's stages of the model, in place.

    example: inputs as of a microbatch, to see where parameters are used; without, the order of registration decides.
    boundaries: the first block of each stage; without, stages are balanced by `cost`, which counts parameters,
    operations (needs an example), or what is given for each block; embedding and head count to the first and last.
    blocks: the path of the list of blocks, where it should not be found automatically. usage: the
    parameter usage, where it is known.
    """
    found = require_stages(model, schedule, blocks)
    if cost == "operations" and example is None:
        raise UsageError("pipeline: to balance stages by operations, pass an example of the model's inputs")
    if usage is None:
        counts = cost == "operations" and boundaries is None
        usage = by_order(model, found) if example is None else by_example(model, found, example, count=counts)
    if boundaries is None:
        starts = balanced(_costs(model, found, usage, cost), schedule.stages)
    else:
        starts = checked(boundaries, len(found.modules), schedule.stages)
    return _keep(model, found, usage, starts, schedule, rank)


def require_stages(model: nn.Module, schedule: Schedule, blocks: str | None = None) -> Blocks:
    """The model's blocks, of which the schedule's stages must each get one at least."""
    found = blocks_of(model, blocks)
    require_enough(len(found.modules), schedule.stages, f"{type(model).__name__} ({found.path or 'its children'})")
    return found


def blocks_of(model: nn.Module, path: str | None = None) -> Blocks:
    """The blocks between which a model can be split into stages. A model may name its list of blocks itself, as
    `pipeline_blocks`."""
    path = getattr(model, "pipeline_blocks", None) if path is None else path
    if path is not None:
        holder = dict(model.named_modules()).get(path)
        if not isinstance(holder, nn.ModuleList | nn.Sequential):
            raise UsageError(f"pipeline: {type(model).__name__} has no nn.ModuleList or nn.Sequential at {path!r}")
        return Blocks(path, tuple(holder.children()))
    if not isinstance(model, nn.Sequential):
        try:
            return find_blocks(model)
        except UsageError:
            layers = layers_of(model)
            if layers is None:
                raise
            return layers
    children = Blocks("", tuple(model.children()))
    try:
        nested = find_blocks(model)
    except UsageError:
        return children
    return nested if len(nested.modules) > len(children.modules) else children


def _costs(model: nn.Module, blocks: Blocks, usage: ParameterUsage, cost: Cost) -> list[float]:
    count = len(blocks.modules)
    if not isinstance(cost, str):
        if len(cost) != count:
            raise UsageError(f"pipeline: {len(cost)} costs are given for {count} blocks; give one for each")
        return list(cost)
    if cost not in COSTS:
        raise UsageError(f"pipeline: cost={cost!r}; expected one of {', '.join(COSTS)}, or a number for each block")
    if cost == "operations":
        assert usage.operations is not None
        return [float(number) for number in usage.operations]
    costs = [0.0] * count
    for parameter in model.parameters():
        for segment in usage.users[id(parameter)]:
            costs[segment] += full_numel(parameter)
    return costs


def _keep(
    model: nn.Module, blocks: Blocks, usage: ParameterUsage, starts: tuple[int, ...], schedule: Schedule, rank: int
) -> StageSplit:
    spans = [range(low, high) for low, high in zip(starts, (*starts[1:], len(blocks.modules)), strict=True)]
    holder = [schedule.placement[stage] for stage, span in enumerate(spans) for _ in span]  # segment -> rank
    ranks = {key: sorted({holder[segment] for segment in segments}) for key, segments in usage.users.items()}
    tied = tuple(
        Tied(name, tuple(ranks[id(parameter)]))
        for name, parameter in model.named_parameters()
        if len(ranks[id(parameter)]) > 1 and rank in ranks[id(parameter)]
    )
    off_stage = OffStage(model, {key for key, holders in ranks.items() if rank in holders})
    numbers = schedule.stages_of(rank)
    stages = tuple(Stage(model, blocks, number, spans[number], off_stage, usage.skips) for number in numbers)
    users = {
        name: tuple(stage.number for stage in stages if not usage.users[id(parameter)].isdisjoint(stage.span))
        for name, parameter in model.named_parameters()
    }
    return StageSplit(model, stages, starts, tied, users)
