"""to_static: one distributed program of a marked model; on a mesh of tensors' shards, or as stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from unisono.comm.rendezvous import world
from unisono.errors import UsageError
from unisono.graph.capture.trace import Loss
from unisono.graph.marks.api import placement_specs_for
from unisono.graph.placement.assignment import Assignment
from unisono.graph.program import program as programs
from unisono.graph.program.program import Model
from unisono.mesh.deferred_init.seeded_init import build, in_dtype
from unisono.mesh.mesh import Mesh
from unisono.parallel.apply import parallelize
from unisono.parallel.pipeline.traced import TracedSegment, TracedStages
from unisono.parallel.static.marked import MarkedStages, require_example, require_order, stages_on
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import Plan


class StagedProgram:
    """A model's graph as the stages of a pipeline, one a rank; made by `uni.to_static` where stages are marked."""

    def __init__(self, trainer: Trainer, staged: TracedStages, mesh: Mesh, stages: MarkedStages, inputs: Any) -> None:
        self.trainer = trainer
        self.mesh = mesh
        self.training = True
        self._stages = stages
        self._shown = staged.splits.of(inputs, True)

    @property
    def optimizer(self) -> Optimizer:
        return self.trainer.optimizer

    def __call__(self, batch: tuple[Any, Any]) -> torch.Tensor:
        """A step of training, or in evaluation mode the loss only, on a global batch; the loss, on every rank."""
        return self.trainer.step(batch) if self.training else self.trainer.evaluate(batch)

    def train(self, mode: bool = True) -> StagedProgram:
        self.training = mode
        return self

    def eval(self) -> StagedProgram:
        return self.train(False)

    def predict(self, inputs: Any) -> Any:
        return self.trainer.predict(inputs)

    def state_dict(self) -> dict[str, Any]:
        """As a Trainer's or a Program's, any of which can load it; every rank calls it."""
        return self.trainer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trainer.load_state_dict(state)

    def __str__(self) -> str:
        return self.text()

    def text(self, rank: int | None = None) -> str:
        """What a rank, by default this one, does with a microbatch, and in which order."""
        rank = world.rank() if rank is None else rank
        position = self.mesh.index(self._stages.axis, rank=rank)
        segment = self._shown.segments[position]
        plan = self.trainer.plan
        before, after = self._neighbour(rank, position - 1), self._neighbour(rank, position + 1)
        lines = [f"stage {position} of {self._stages.count} on rank {rank}, plan {plan}; of one microbatch:"]
        lines += [f"  recv from rank {before}: {self._named(segment.received)}"] if segment.received else []
        lines += [f"  {line}" for line in _ops(segment)]
        if position < self._stages.count - 1:
            lines += [f"  send to rank {after}: {self._named(segment.sent)}"]
            lines += [f"  backward: recv from rank {after} the gradients of what was sent"]
        if segment.received:
            lines += [f"  backward: send to rank {before} the gradients of what was received"]
        assert self.trainer.pipeline is not None
        order = " ".join(str(action) for action in self.trainer.pipeline.schedule.actions[position])
        return "\n".join([*lines, f"order: {order}"])

    def _neighbour(self, rank: int, position: int) -> int:
        if not 0 <= position < self._stages.count:
            return -1
        coordinate = list(self.mesh.coordinate(rank))
        coordinate[self.mesh.axis(self._stages.axis)] = position
        return int(self.mesh.ranks[tuple(coordinate)])

    def _named(self, names: tuple[str, ...]) -> str:
        specs = self._shown.trace.specs
        return ", ".join(f"{name} {list(specs[name][0].shape)}" for name in names)


def _ops(segment: TracedSegment) -> list[str]:
    lines = []
    for op in segment.ops:
        given = ", ".join(node.name for node in op.all_input_nodes)
        lines.append(f"{op.name} = {str(op.target).removesuffix('.default')}({given}) {list(op.meta['val'].shape)}")
    return lines


def to_static(
    model: Model,
    *,
    example: tuple[Any, Any],
    mesh: Mesh,
    loss: Loss,
    optimizer: Callable[[Any], Optimizer],
    search: str = "propagate",
    assignment: Assignment | None = None,
    save_graphs: str | Path | None = None,
    fully_use_devices: bool = False,
    unpack: bool = False,
    memory: float | None = None,
    zero: int = 0,
    microbatches: int = 1,
    schedule: str = "1f1b",
    clip: float | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> Any:
    """One distributed program for a model, its loss and its optimizer, on a mesh; every rank calls it alike.

    Where modules are marked as the first of a stage (`uni.mark(model, "layers.6", mesh.at(pp=1))`), the program is a
    pipeline.

    Args:
        model: A module, which becomes that of rank 0 everywhere, or a function that builds one, called after
            torch.manual_seed(seed).
        example: A global batch (inputs, targets), of which only shapes and dtypes count.
        mesh: Of the ranks.
        loss: loss(outputs, targets) gives a scalar.
        optimizer: optimizer(parameters) gives a torch optimizer.
        search: How placements are found that no mark gives: "propagate", "recursive", "dynamic" or "exact".
        assignment: All placements, instead of a search.
        save_graphs: A folder for the program of every rank after each pass.
        fully_use_devices: Ops prefer placements that give every rank a share.
        unpack: Shard the parts of fused projections (queries, keys and values in one weight) each by itself.
        memory: Bytes that a rank may hold of parameters, gradients, two states of an optimizer and what the backward
            needs, for "dynamic" and "exact".
        zero: What the ranks of the axis dp share: 1 optimizer state, 2 gradients too, 3 parameters too.
        microbatches: Of a pipeline.
        schedule: Of a pipeline.
        clip: The largest norm of the gradients.
        seed: Of initial weights and random numbers.
        dtype: Of the model's parameters; default: as it is built.

    Returns:
        A Program; a StagedProgram where there are stages.
    """
    require_example(example)
    full = model if isinstance(model, nn.Module) else build(model, seed)
    made: Model = model if isinstance(model, nn.Module) else lambda: full
    job: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "example": example}
    job |= {"clip": clip, "seed": seed, "dtype": dtype}
    layout: dict[str, Any] = {"search": search, "assignment": assignment}
    layout |= {"fully_use_devices": fully_use_devices, "unpack": unpack, "memory": memory}
    stages = stages_on(full, mesh, example[0]) if isinstance(full, nn.Module) else None
    if stages is not None:
        if layout != _NO_LAYOUT:
            raise UsageError(
                f"to_static({', '.join(layout)}) lay out tensors, but this program is made of marked stages"
            )
        plan = _plan(full, mesh, stages, zero, microbatches, schedule)
        return _staged(made, full, mesh, stages, plan, job, save_graphs)
    if microbatches != 1 or schedule != "1f1b":
        raise UsageError(
            f"to_static(microbatches={microbatches}, schedule={schedule!r}) is for a pipeline, but no stage is marked; "
            'mark one with uni.mark(model, "layers.6", mesh.at(pp=1))'
        )
    return programs.to_static(made, mesh=mesh, save_graphs=save_graphs, zero=zero, **layout, **job)


_NO_LAYOUT = {
    "search": "propagate", "assignment": None, "fully_use_devices": False, "unpack": False, "memory": None
}  # fmt: skip


def _staged(
    made: Model,
    full: nn.Module,
    mesh: Mesh,
    stages: MarkedStages,
    plan: Plan,
    job: dict[str, Any],
    save_graphs: str | Path | None,
) -> StagedProgram:
    dtype = job["dtype"]
    staged = TracedStages(full if dtype is None else in_dtype(full, dtype), stages.stage_of, stages.count)
    trainer = parallelize(staged if isinstance(made, nn.Module) else (lambda: staged), plan, **job)
    microbatch = tree_map(lambda leaf: _microbatch_of(leaf, plan), job["example"][0])
    program = StagedProgram(trainer, staged, mesh, stages, microbatch)
    if save_graphs is not None:
        position = Path(save_graphs) / f"rank_{world.rank()}"
        position.mkdir(parents=True, exist_ok=True)
        (position / "stage.txt").write_text(f"{program}\n")
    return program


def _plan(model: nn.Module, mesh: Mesh, stages: MarkedStages, zero: int, microbatches: int, schedule: str) -> Plan:
    others = [name for name in mesh.names if name not in (stages.axis, "dp") and mesh.size(name) > 1]
    if others or placement_specs_for(model):
        raise UsageError(
            f"a static pipeline is made of stages and the axis dp, but {', '.join(others) or 'marked tensors'} of "
            f"{mesh} would be in it too; uni.apply_marks composes them"
        )
    require_order(mesh, {stages.axis: "pp", **({"dp": "dp"} if "dp" in mesh.names else {})})
    dp = mesh.size("dp") if "dp" in mesh.names else 1
    return Plan(pp=stages.count, dp=dp, zero=zero, microbatches=microbatches, schedule=schedule)


def _microbatch_of(leaf: Any, plan: Plan) -> Any:
    """A leaf of the example's inputs as a microbatch of a data rank has it."""
    return leaf[: len(leaf) // (plan.dp * plan.microbatches)] if isinstance(leaf, torch.Tensor) and leaf.ndim else leaf
