"""Marks instead of a plan: placements of some tensors and modules, and the plan that follows from it.

    uni.mark(model, "linear1.weight", mesh, [uni.Shard(0)])        # the other layers follow
    uni.mark(model, "linear3", mesh.at(pp=1))                      # a pipeline's second stage
    trainer = uni.apply_marks(model, mesh=mesh, loss=loss, optimizer=optimizer, example=batch)

The model itself runs, op by op, under that plan (`trainer.plan`); `uni.to_static` makes a program of the same marks.
What each axis of the mesh does is read off the marks and what propagates from them:

    pp      stages are marked on parts of it
    dp      inputs are sharded along it, or it is called dp
    tp      parameters are sharded along it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.errors import UsageError
from unisono.graph.capture.trace import Trace, trace
from unisono.graph.marks.api import applied, placement_specs_for, stages_for
from unisono.graph.marks.recording import dry_run
from unisono.graph.marks.spec import PlacementSpec
from unisono.graph.placement.assignment import Assignment, producers
from unisono.graph.placement.find import find
from unisono.graph.placement.strategy import placements_of_marks
from unisono.graph.program.program import Model
from unisono.graph.rules.call import OpCall
from unisono.graph.rules.option import REPLICATE
from unisono.mesh.deferred_init.seeded_init import build
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import shard_dim
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.apply import parallelize
from unisono.parallel.blocks import Blocks
from unisono.parallel.inputs import call
from unisono.parallel.loss.loss import Loss
from unisono.parallel.meta.meta_tensors import meta_copy, to_meta
from unisono.parallel.pipeline.split import blocks_of
from unisono.parallel.tensor.linear import is_linear
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import AXES, Plan


def apply_marks(
    model: Model,
    *,
    mesh: Mesh,
    loss: Loss,
    optimizer: Callable[[Any], Optimizer],
    example: tuple[Any, Any],
    zero: int = 0,
    microbatches: int = 1,
    schedule: str = "1f1b",
    clip: float | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> Trainer:
    """Put a plain model under the plan that its marks make; every rank calls it alike.

    Args:
        model: As for uni.parallelize.
        mesh: That of the marks.
        loss: loss(outputs, targets) gives a scalar.
        optimizer: optimizer(parameters) gives a torch optimizer.
        example: A batch (inputs, targets).
        zero: What the ranks of the data axis share besides.
        microbatches: Of a pipeline.
        schedule: Of a pipeline.
        clip: The largest norm of the gradients.
        seed: Of initial weights and random numbers.
        dtype: Of the model's parameters; default: as it is built.
    """
    require_example(example)
    full = model if isinstance(model, nn.Module) else build(model, seed)
    plan, rules = plan_of_marks(full, mesh, loss, example)
    plan = plan.but(zero=zero, microbatches=microbatches, schedule=schedule)
    with applied():
        trainer = parallelize(
            full if isinstance(model, nn.Module) else lambda: full,
            plan,
            loss=loss,
            optimizer=optimizer,
            example=example,
            rules=rules,
            clip=clip,
            seed=seed,
            dtype=dtype,
        )
    trainer.model.forward = applied()(trainer.model.forward)
    return trainer


def require_example(example: Any) -> None:
    if not isinstance(example, tuple | list) or len(example) != 2:
        raise UsageError(f"example is {type(example).__name__}; expected a global batch: (inputs, targets)")


def plan_of_marks(
    model: nn.Module, mesh: Mesh, loss: Loss, example: tuple[Any, Any]
) -> tuple[Plan, dict[str, str] | None]:
    """The plan, and the rules by which tp shards, that follow from a model's marks on a mesh."""
    stages = stages_on(model, mesh, example[0])
    roles: dict[str, str] = {}
    starts: tuple[int, ...] = ()
    if stages is not None:
        roles[stages.axis] = "pp"
        starts = stages.boundaries(blocks_of(model))
    rest = [name for name in mesh.names if name not in roles and mesh.size(name) > 1]
    rules: dict[str, str] = {}
    if rest and (set(rest) != {"dp"} or _has_marks(model)):
        inner = Mesh.describe([mesh.size(name) for name in rest], rest)
        traced = trace(model, example, loss)
        _require_marks(traced, inner)
        found = find(traced, inner)
        for name in rest:
            roles[name] = _role(found, name)
        rules = _rules(model, found, [name for name in rest if roles[name] == "tp"])
    elif rest:
        roles["dp"] = "dp"
    require_order(mesh, roles)
    sizes = {role: mesh.size(name) for name, role in roles.items()}
    return Plan().but(**sizes, boundaries=starts), rules or None


def _has_marks(model: nn.Module) -> bool:
    return bool(placement_specs_for(model))


# ---- stages ----------------------------------------------------------------------------------------------------------


class MarkedStages:
    """Which modules begin which stage of a pipeline, along which axis."""

    def __init__(self, axis: str, count: int, stage_of: dict[str, int]) -> None:
        self.axis = axis
        self.count = count
        self.stage_of = stage_of

    def boundaries(self, blocks: Blocks) -> tuple[int, ...]:
        """The first block of every stage."""
        names = [blocks.name(number) for number in range(len(blocks.modules))]
        unknown = sorted(set(self.stage_of) - set(names))
        if unknown:
            raise UsageError(f"{unknown[0]} is marked as a stage's first, but blocks are {', '.join(names)}")
        starts = {0: 0}
        for number, name in enumerate(names):
            if name in self.stage_of:
                starts.setdefault(self.stage_of[name], number)
        order = [starts.get(stage) for stage in range(self.count)]
        if None in order or order != sorted(order, key=lambda start: start or 0):
            raise UsageError(
                f"{self.axis}={self.count} needs as many stages in the order of the blocks ({', '.join(names)}), but "
                f"the marks give {self.stage_of}; mark the first block of every stage but stage 0"
            )
        return tuple(start for start in order if start is not None)


def stages_on(model: nn.Module, mesh: Mesh, inputs: Any) -> MarkedStages | None:
    """The stages that a model's marks make on a mesh, those in its forward too; None where none are marked."""
    marked = stages_for(model) | _stages_in_forward(model, inputs)
    found = {name: _stage_of_mark(placement_spec, mesh) for name, placement_spec in marked.items()}
    axes = {axis for axis, _ in found.values()}
    if len(axes) > 1:
        raise UsageError(f"stages are marked along the axes {', '.join(sorted(axes))}; expected one")
    if not found:
        return None
    axis = axes.pop()
    return MarkedStages(axis, mesh.size(axis), {name: position for name, (_, position) in found.items()})


def _stages_in_forward(model: nn.Module, inputs: Any) -> dict[str, PlacementSpec]:
    """Marks that the model makes while it runs. It is run without values; one that needs values is taken to make
    none."""
    try:
        copy = meta_copy(model)
    except Exception:
        return {}
    with no_side_effects(model), dry_run(copy) as recorder, torch.no_grad(), torch.device("meta"):
        call(copy, to_meta(inputs))
    return recorder.stages


def _stage_of_mark(placement_spec: PlacementSpec, mesh: Mesh) -> tuple[str, int]:
    for axis in mesh.names:
        for position in range(mesh.size(axis)):
            if mesh.size(axis) > 1 and placement_spec.mesh == mesh.at(**{axis: position}):
                return axis, position
    raise UsageError(
        f"a stage is marked for {placement_spec.mesh} ({placement_spec.line}); "
        f"expected a submesh of {mesh}, as mesh.at(pp=1)"
    )


# ---- the other axes --------------------------------------------------------------------------------------------------


def _require_marks(traced: Trace, mesh: Mesh) -> None:
    marked = placements_of_marks(traced, mesh, traced.marks).values()
    for axis, name in enumerate(mesh.names):
        if name != "dp" and all(placements[axis] == REPLICATE for placements in marked):
            raise UsageError(f"nothing is marked along {name}: shard a parameter or the inputs there, or call it dp")


def _role(found: Assignment, axis: str) -> str:
    trace, position = found.trace, found.mesh.axis(axis)
    sharded = [name for node, name in trace.parameters.items() if found.layout(node)[position] != REPLICATE]
    fed = [node for node in trace.inputs if shard_dim(found.layout(node)[position]) == 0]
    if sharded and fed:
        raise UsageError(
            f"along {axis} both the inputs and {sharded[0]} are sharded, which no plan does: mark one of them; to "
            "share out parameters among data ranks pass zero=3; or make a program of the marks with uni.to_static"
        )
    if sharded:
        return "tp"
    if fed:
        return "dp"
    raise UsageError(
        f"along {axis} neither parameters nor inputs are sharded, which no plan does; uni.to_static can do it"
    )


def _rules(model: nn.Module, found: Assignment, axes: list[str]) -> dict[str, str]:
    if len(axes) > 1:
        raise UsageError(
            f"parameters are sharded along {' and '.join(axes)}; a plan has one such axis (uni.to_static any)"
        )
    if not axes:
        return {}
    axis, modules, rules = found.mesh.axis(axes[0]), dict(model.named_modules()), {}
    for node, name in found.trace.parameters.items():
        layer, _, kind = name.rpartition(".")
        dim = shard_dim(found.layout(node)[axis])
        if dim is None or kind == "bias":
            continue
        if kind != "weight" or not (is_linear(modules[layer]) or isinstance(modules[layer], nn.Embedding)):
            raise UsageError(f"{name} is sharded, but a plan shards linear layers and embeddings; use uni.to_static")
        rules[layer] = _rule(found, node, axis, dim, modules[layer])
    return rules


def _rule(found: Assignment, node: str, axis: int, dim: int, module: nn.Module) -> str:
    if isinstance(module, nn.Embedding):
        return "vocab"
    op = next(user for user in found.trace.node(node).users)
    by_outputs = dim == (0 if isinstance(module, nn.Linear) else 1)
    if by_outputs:
        users = [(u.name, i) for u in op.users for i, t in enumerate(OpCall(u).tensors) if t is op]
        stays = users and all(shard_dim(found.wanted(user, i)[axis]) is not None for user, i in users)
        return "column" if stays else "column_gather"
    source, output = producers(op)[0]
    return "row" if shard_dim(found.layout(source, output)[axis]) is not None else "row_split"


def require_order(mesh: Mesh, roles: dict[str, str]) -> None:
    """Ranks are ordered by the plan, the axes of which have an order."""
    order = [roles[name] for name in mesh.names if name in roles]
    if order != sorted(order, key=AXES.index):
        listed = ", ".join(role for role in AXES if role in order)
        raise UsageError(f"{mesh}: a plan's axes come in the order {listed}; name the mesh's axes in that order")
