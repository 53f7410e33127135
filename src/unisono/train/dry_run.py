"""A dry run: one rank of a big job, executed here, with communication simulated.

torch's "fake" process group takes part in every collective at once and brings nothing, so one process can be any rank
of any world: its shapes, its memory and its computing are real, its numbers are not. The model is built without memory,
and gets some for what the plan leaves this rank. A rank of a later stage is told beforehand what the stages before it
would send (upstream.py), and then receives random numbers of that form.
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from unisono.comm import world
from unisono.errors import UsageError
from unisono.launch.spawn import spawn
from unisono.mesh.draft import tensors_in
from unisono.mesh.mesh import Mesh
from unisono.mesh.random import RandomState
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.apply import applied, order_of, refuse_what_cannot_be_right
from unisono.parallel.pipeline.message import is_hollow
from unisono.parallel.share import BatchDim, dims_of, first_rows, share, shares
from unisono.parallel.tensor import fitting_rules, require_shareable, shows_by_running
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import AXES, DATA, Plan
from unisono.train.meter import Meter
from unisono.train.sketch import to_try_out
from unisono.train.upstream import Upstream, foreseen_in
from unisono.verify.task import Task, load_task


@dataclass(frozen=True)
class DryRun:
    """What one rank took."""

    rank: int
    plan: str
    device: str
    peak: float  # bytes, at most in a step
    state: float  # bytes of parameters and optimizer state
    seconds: float  # of a step's computing

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"dry run of rank {self.rank} of {self.plan} on {self.device}: peak {self.peak / 2**20:.1f} MiB, "
            f"model state {self.state / 2**20:.1f} MiB, {self.seconds * 1e3:.1f} ms a step, communication left out"
        )


def dry_run(task: Task | str, plan: Plan, rank: int, batch: int | None = None, steps: int = 3) -> DryRun:
    """Run a rank of the plan in a process of its own."""
    found: DryRun = spawn(_on_its_own, 1, None, (task, str(plan), rank, batch, steps))[0]
    return found


def _on_its_own(task: Task | str, plan: str, rank: int, batch: int | None, steps: int) -> DryRun:
    return run_here(load_task(task) if isinstance(task, str) else task, Plan.parse(plan), rank, batch, steps)


def run_here(task: Task, plan: Plan, rank: int, batch: int | None = None, steps: int = 3) -> DryRun:
    """The same in this process, which must not have joined a world."""
    if not 0 <= rank < plan.world:
        raise UsageError(f"rank {rank} of plan {plan}: expected one of 0 to {plan.world - 1}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with world.simulated(rank, plan.world):
        mesh = Mesh(plan.shape, AXES)
        mesh.connect()
        with Meter(device) as meter:
            given = _on(_of_size(task.batch(0), batch, task.batch_dim), device)
            trainer = built(task, plan, mesh, given, device)
            trainer.step(given)  # the optimizer makes its state
            gc.collect()
            meter.restart()
            trainer.step(given)
        seconds = [_timed(trainer, given, device) for _ in range(steps)]
        name = torch.cuda.get_device_name() if device.type == "cuda" else "this CPU"
        return DryRun(rank, str(plan), name, meter.peak, state_of(trainer), sorted(seconds)[len(seconds) // 2])


def _timed(trainer: Trainer, given: Any, device: torch.device) -> float:
    start = time.perf_counter()
    trainer.step(given)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def built(task: Task, plan: Plan, mesh: Mesh, given: Any, device: torch.device) -> Trainer:
    """The trainer of this rank for batches like the one given, without the values that its parameters should have."""
    with no_side_effects(task.model), torch.device("meta"):
        model = task.model()
    refuse_what_cannot_be_right(plan, model)
    rules = task.rules
    if plan.tp > 1:
        if rules is None and shows_by_running(model):
            model = to_try_out(task, model)
        rules = fitting_rules(model, plan.tp, rules, _of_size(task.batch(0), 2, task.batch_dim))
        require_shareable(model, plan.tp, rules)
    random = RandomState(0)
    random.name_modules(model)
    mine = shares(
        share(given, mesh.index(*DATA), mesh.size(*DATA), task.batch_dim).batch, plan.microbatches, task.batch_dim
    )
    upstream, shown = None, None
    if plan.pp > 1:
        shown = foreseen_in(model, order_of(plan), mine[0].batch[0])
        upstream = Upstream(model, plan, mesh, rules)
    trainer = applied(
        model, plan, mesh, random, task.loss, task.optimizer, given, rules, task.clip,
        fill=lambda made: give_memory(made, device), shown=shown, batch_dim=task.batch_dim,
    )  # fmt: skip
    trainer.loss.trust()
    if upstream is not None:
        _foretell(trainer, upstream, [part.batch for part in mine], device)
    return trainer


def _foretell(trainer: Trainer, upstream: Upstream, microbatches: list[Any], device: torch.device) -> None:
    """Tell the pipeline the forms of its messages, and cp the length of its sequences."""
    assert trainer.pipeline is not None
    for stage in trainer.pipeline.stages.values():
        if not stage.is_first:
            trainer.pipeline.forms[stage.number].update(upstream.forms(stage.span.start, microbatches, device))
            if trainer.context is not None and upstream.context is not None:
                trainer.context.learn_lengths(upstream.context)


@torch.no_grad()
def give_memory(model: nn.Module, device: torch.device) -> None:
    """Memory for every tensor of a model that has none; parameters keep their identity, and what is written on them."""
    for _, tensor in list(tensors_in(model)):
        if not tensor.is_meta or is_hollow(tensor):  # those that stand in for parameters of other stages stay hollow
            continue
        made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        if tensor.is_floating_point() and tensor.dim() > 1:
            made.normal_(std=0.02)
        made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        vars(made).update(vars(tensor))
        torch.utils.swap_tensors(tensor, made)


def _of_size(batch: Any, rows: int | None, dim: BatchDim) -> Any:
    """The batch with so many samples: those it has, again and again."""
    has = first_rows(batch, dim)
    if rows is None or rows == has:
        return batch
    places = torch.arange(rows) % has
    leaves, spec = pytree.tree_flatten(batch)
    resized = [
        leaf.index_select(along, places.to(leaf.device)) if along is not None and leaf.shape[along] == has else leaf
        for leaf, along in zip(leaves, dims_of(batch, dim), strict=True)
    ]
    return pytree.tree_unflatten(resized, spec)


def _on(tree: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, tree)


def state_of(trainer: Trainer) -> float:
    """Bytes of this rank's parameters and of what the optimizer keeps of them."""
    held = sum(p.untyped_storage().nbytes() for p in trainer.model.parameters())
    kept = sum(
        value.numel() * value.itemsize
        for each in trainer.optimizer.state.values()
        for value in each.values()
        if isinstance(value, torch.Tensor)
    )
    return float(held + kept)
