"""The trainer of one rank of a plan, in this process alone: every other rank is simulated.

torch's "fake" process group completes every collective at once, so that one process can be any rank of any world: its
shapes, memory and computation are real, its numbers are not. The model is built on the meta device and gets memory for
the part that the plan leaves this rank. A rank of a later pipeline stage is given the shapes of what earlier stages
would send (upstream.py), and receives random numbers of those shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from unisono.comm.rendezvous import world
from unisono.errors import UsageError
from unisono.mesh.deferred_init.deferred_model import tensors_in
from unisono.mesh.mesh import Mesh
from unisono.mesh.random.state import RandomState
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.apply import parallelize, refuse_what_cannot_be_right
from unisono.parallel.compose import Composition, compose, schedule_of
from unisono.parallel.meta.meta_tensors import meta_copy
from unisono.parallel.pipeline.message import is_placeholder
from unisono.parallel.precision import Precision
from unisono.parallel.share import BatchDim, dims_of, first_batch_size, share, shares
from unisono.parallel.task import Task
from unisono.parallel.tensor.tensor_parallel import fitting_rules, require_shareable, shows_by_running
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import AXES, DATA, Plan
from unisono.simulate.sketch import to_try_out, without_memory
from unisono.simulate.upstream import Upstream, foreseen_in


@contextlib.contextmanager
def simulated_mesh(plan: Plan, rank: int) -> Iterator[Mesh]:
    """In the block this process is `rank` of the plan; a world that it has joined is set aside."""
    if not 0 <= rank < plan.world:
        raise UsageError(f"rank {rank} of plan {plan}: expected one of 0 to {plan.world - 1}")
    with world.simulated(rank, plan.world):
        mesh = Mesh(plan.shape, AXES)
        mesh.connect()
        yield mesh


def build_trainer(task: Task, plan: Plan, mesh: Mesh, given: Any, device: torch.device | None) -> Trainer:
    """This rank's trainer for batches like `given`. Its parameters have random values on the device; without one they
    stay on meta."""
    with no_side_effects(task.model), torch.device("meta"):
        model = task.model()
    refuse_what_cannot_be_right(plan, model)
    rules = task.rules
    if plan.tp > 1:
        if rules is None and shows_by_running(model):
            model = to_try_out(task, model)
        rules = fitting_rules(model, plan.tp, rules, resized(task.batch(0), 2, task.batch_dim))
        require_shareable(model, plan.tp, rules)
    random = RandomState(0)
    random.name_modules(model)
    mine = shares(
        share(given, mesh.index(*DATA), mesh.size(*DATA), task.batch_dim).batch, plan.microbatches, task.batch_dim
    )
    upstream, shown = None, None
    if plan.pp > 1:
        shown = foreseen_in(model, schedule_of(plan), mine[0].batch[0])
        upstream = Upstream(model, plan, mesh, rules)
    made = Composition(
        model, plan, mesh, random, task.loss, task.optimizer, given, rules, task.clip,
        rehearsal=shown, batch_dim=task.batch_dim, precision=Precision.of(task.precision),
    )  # fmt: skip
    if device is not None:
        made.fill = lambda model: give_memory(model, device)
    trainer = compose(made)
    trainer.precision = made.precision
    trainer.scaler = made.precision.scaler(mesh)
    trainer.loss.trust()
    if upstream is not None:
        _announce_messages(trainer, upstream, [part.batch for part in mine], device or torch.device("cpu"))
    return trainer


def _announce_messages(trainer: Trainer, upstream: Upstream, microbatches: list[Any], device: torch.device) -> None:
    """Give the pipeline the shapes of its messages, and cp the length of its sequences."""
    assert trainer.pipeline is not None
    for stage in trainer.pipeline.stages.values():
        if not stage.is_first:
            trainer.pipeline.forms[stage.number].update(upstream.forms(stage.span.start, microbatches, device))
            if trainer.context is not None and upstream.context is not None:
                trainer.context.learn_lengths(upstream.context)


@torch.no_grad()
def give_memory(model: nn.Module, device: torch.device) -> None:
    """Allocate every tensor of the model that is on meta; parameters keep their identity and attributes."""
    for _, tensor in list(tensors_in(model)):
        if not tensor.is_meta or is_placeholder(tensor):  # placeholders of other stages' parameters stay on meta
            continue
        made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        if tensor.is_floating_point() and tensor.dim() > 1:
            made.normal_(std=0.02)
        made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        vars(made).update(vars(tensor))
        torch.utils.swap_tensors(tensor, made)


def resized(batch: Any, samples: int | None, dim: BatchDim) -> Any:
    """The batch with so many samples: those it has, repeated."""
    has = first_batch_size(batch, dim)
    if samples is None or samples == has:
        return batch
    indices = torch.arange(samples) % has
    leaves, spec = pytree.tree_flatten(batch)
    resized = [
        leaf.index_select(along, indices.to(leaf.device)) if along is not None and leaf.shape[along] == has else leaf
        for leaf, along in zip(leaves, dims_of(batch, dim), strict=True)
    ]
    return pytree.tree_unflatten(resized, spec)


def on_device(tree: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, tree)


def state_of(trainer: Trainer) -> float:
    """Bytes of this rank's parameters and of the optimizer's state."""
    held = sum(p.untyped_storage().nbytes() for p in trainer.model.parameters())
    kept = sum(
        value.numel() * value.itemsize
        for each in trainer.optimizer.state.values()
        for value in each.values()
        if isinstance(value, torch.Tensor)
    )
    return float(held + kept)


@contextlib.contextmanager
def simulated_trainer(
    task: Task, plan: Plan, rank: int, batch: Any, options: dict[str, Any] | None = None
) -> Iterator[Trainer]:
    """`rank` of the plan, as `uni.parallelize` makes it; its parameters have the values that they would have.

    options: further arguments of `parallelize`."""
    if not 0 <= rank < plan.world:
        raise UsageError(f"rank {rank} of plan {plan}: expected one of 0 to {plan.world - 1}")
    upstream_model = meta_copy(without_memory(task)) if plan.pp > 1 else None  # before the task's own module is split
    with world.simulated(rank, plan.world):
        trainer = parallelize(
            task.model, plan, loss=task.loss, optimizer=task.optimizer, example=batch, rules=task.rules,
            batch_dim=task.batch_dim, **({"clip": task.clip, "precision": task.precision} | (options or {})),
        )  # fmt: skip
        trainer.loss.trust()
        if upstream_model is not None and trainer.pipeline is not None:
            mesh = trainer.mesh
            upstream = Upstream(upstream_model, plan, mesh, trainer.rules)
            mine = share(batch, mesh.index(*DATA), mesh.size(*DATA), task.batch_dim).batch
            parts = shares(mine, plan.microbatches, task.batch_dim)
            device = next(trainer.model.parameters()).device
            _announce_messages(trainer, upstream, [part.batch for part in parts], device)
        yield trainer
