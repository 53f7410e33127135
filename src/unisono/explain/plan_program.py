"""The program of one rank under a plan, recorded: the task runs on one device, and on a simulated rank of the plan.

Nothing of the plan is derived again here: the rank runs the trainer that a real rank runs (simulate/rank.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from unisono.explain.align import aligned
from unisono.explain.record import RankRecord, RankRecorder
from unisono.graph.render.listing import ListedInput, Listing, placements_text, tensor_text
from unisono.mesh.deferred_init.seeded_init import build
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placement, Replicate, Shard
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.expert.even_experts import evenly_visited
from unisono.parallel.inputs import call
from unisono.parallel.layout import Layout, layout_of, summed_axes
from unisono.parallel.meta.shadow import OnMeta
from unisono.parallel.pipeline.message import is_placeholder
from unisono.parallel.precision import Precision, autocast
from unisono.parallel.share import shares
from unisono.parallel.task import Task
from unisono.parallel.trainer import Trainer
from unisono.parallel.zero.zero import ShardedOptimizer
from unisono.plan.plan import Plan
from unisono.simulate.rank import build_trainer, simulated_mesh, simulated_trainer
from unisono.simulate.sketch import without_memory
from unisono.simulate.without_values import WithoutValues

_SMALL = 2 * 10**8  # parameters up to which a model is built
_KEPT = {
    1: "optimizer state of",
    2: "gradient and optimizer state of",
    3: "parameter, gradient and optimizer state of",
}


def explained(task: Task, plan: Plan, rank: int = 0) -> Listing:
    """What `rank` does in a training step under the plan, beside what one device does."""
    batch = task.batch(0)
    form = without_memory(task)
    if sum(parameter.numel() for parameter in form.parameters()) > _SMALL:
        return _explained_without_memory(task, plan, rank, form, batch)
    serial = recorded_on_one_device(task, plan)
    with simulated_trainer(task, plan, rank, batch) as trainer:
        trainer.step(batch)  # the first step also checks what it is given
        return listing(serial, recorded_step(trainer, batch), trainer, batch, rank)


def _explained_without_memory(task: Task, plan: Plan, rank: int, form: nn.Module, batch: Any) -> Listing:
    """The same of a model that is too large to be built: on the meta device, where only shapes are computed."""
    device = torch.device("cpu")
    serial = recorded_on_one_device(task, plan, form)
    with simulated_mesh(plan, rank) as mesh:
        trainer = build_trainer(task, plan, mesh, batch, None)
        with WithoutValues(device):
            local = recorded_step(trainer, batch)
            return listing(serial, local, trainer, batch, rank)


def recorded_on_one_device(task: Task, plan: Plan, model: nn.Module | None = None) -> RankRecord:
    """The forward and the loss of the samples that the first microbatch of all data ranks holds.

    model: one on the meta device, which takes no memory; by default the task's is built."""
    inputs, targets = shares(task.batch(0), plan.microbatches, task.batch_dim)[0].batch
    on_meta = model is not None
    with no_side_effects(task.model, task.loss):
        model = build(task.model, 0) if model is None else model
        recorder = RankRecorder(model)
        _name_batch(recorder, (inputs, targets))
        with contextlib.ExitStack() as modes:
            if on_meta:
                modes.enter_context(evenly_visited(model))  # routing needs values
                modes.enter_context(OnMeta(torch.device("cpu")))
            device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
            modes.enter_context(autocast(Precision.of(task.precision).dtype, device))
            modes.enter_context(recorder)
            task.loss(call(model, inputs), targets)
        recorder.forget()
    return recorder.record


def recorded_step(trainer: Trainer, batch: Any) -> RankRecord:
    recorder = RankRecorder(trainer.model)
    with recorder.step(trainer):
        trainer.step(batch)
    return recorder.record


def listing(serial: RankRecord, local: RankRecord, trainer: Trainer, batch: Any, rank: int) -> Listing:
    sizes = {name: trainer.mesh.size(name) for name in trainer.mesh.names}
    shown = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
    mesh = Mesh.describe(list(shown.values()), list(shown))
    made = aligned(serial, local, mesh, rank, all_stages=trainer.pipeline is None)
    made.given = [*_parameters(trainer, mesh), *_buffers(trainer.model, mesh), *_batch(trainer, batch)]
    if trainer.plan.ep > 1:
        made.about.append("ep: sizes of messages between experts are those of ranks whose tokens all choose alike")
    if trainer.plan.offload:
        made.about.append("offload: the optimizer and its shards are in host memory")
    return made


def _name_batch(recorder: RankRecorder, batch: tuple[Any, Any]) -> None:
    for kind, tree in zip(("inputs", "targets"), batch, strict=True):
        for path, leaf in tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, torch.Tensor):
                keys = "".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
                recorder.name(leaf, f"{kind}.{keys}" if keys else kind)


def _parameters(trainer: Trainer, mesh: Mesh) -> Iterator[ListedInput]:
    zero = trainer.replicas if isinstance(trainer.replicas, ShardedOptimizer) else None
    tied = trainer.tied.names if trainer.tied is not None else frozenset()
    for name, parameter in trainer.model.named_parameters():
        shard = None if zero is None else zero.shards.get(name)
        local = tuple(parameter.shape if shard is None else shard.shape)
        if is_placeholder(parameter) and shard is None:
            continue  # a placeholder of another stage's
        layout = layout_of(parameter) if shard is None else shard.full_layout
        kept = ""
        if zero is not None and shard is not None:
            kept = f"{_KEPT[zero.stage]} {tensor_text(parameter.dtype, shard.local_shape)}"
            if shard.optimized.dtype != parameter.dtype:
                kept += f", master weights {tensor_text(shard.optimized.dtype, shard.local_shape)}"
        yield ListedInput(
            name,
            "parameter",
            tensor_text(parameter.dtype, full_shape(local, layout)),
            tensor_text(parameter.dtype, local),
            placements_text(_placements(layout, mesh)),
            _shards(full_shape(local, layout), local),
            summed_axes(parameter, trainer.mesh) if parameter.requires_grad else (),
            "tied: its gradient is summed with that of another stage" if name in tied else "",
            kept,
        )


def _buffers(model: nn.Module, mesh: Mesh) -> Iterator[ListedInput]:
    for name, buffer in model.named_buffers():
        layout = layout_of(buffer)
        local = tuple(buffer.shape)
        full = full_shape(local, layout)
        texts = tensor_text(buffer.dtype, full), tensor_text(buffer.dtype, local)
        yield ListedInput(name, "buffer", *texts, placements_text(_placements(layout, mesh)), _shards(full, local))


def _batch(trainer: Trainer, batch: Any) -> Iterator[ListedInput]:
    """The first microbatch, of all data ranks and here."""
    full = shares(batch, trainer.plan.microbatches, trainer.batch_dim)[0].batch
    here = trainer.first_microbatch()
    for kind, *both in (("input", full[0], here[0]), ("target", full[1], here[1])):
        leaves = [[leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)] for tree in both]
        for number, (full_value, local) in enumerate(zip(*leaves, strict=False)):
            name = f"{kind}s" if len(leaves[0]) == 1 else f"{kind}s[{number}]"
            texts = tensor_text(full_value.dtype, tuple(full_value.shape)), tensor_text(local.dtype, tuple(local.shape))
            shards = _shards(tuple(full_value.shape), tuple(local.shape)) if full_value.dim() == local.dim() else ""
            yield ListedInput(name, kind, *texts, "", shards)


def full_shape(local: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """Of the tensor that this rank has a shard of."""
    shape = list(local)
    for split in reversed(layout.splits):
        shape[split.dim] = split.length
    return tuple(shape)


def _placements(layout: Layout, mesh: Mesh) -> list[Placement]:
    dims = {axis: split.dim for split in layout.splits for axis in split.axes}
    return [Shard(dims[name]) if name in dims else Replicate() for name in mesh.names]


def _shards(full: tuple[int, ...], local: tuple[int, ...]) -> str:
    return f"({','.join(str(math.ceil(a / b)) if b else '0' for a, b in zip(full, local, strict=True))})"
