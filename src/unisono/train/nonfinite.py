"""Finds the module that first returned NaN or infinity, for a run that stops because its loss is not finite.

The step is repeated with hooks on every module; random numbers are a function of the step, so the repetition is exact.
The origin has finite inputs and an output that is not. So may later modules, if ranks shard samples or sequences: data
received from other ranks is not among their inputs. The first in the order of one device is reported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from unisono.comm.rendezvous import world
from unisono.comm.signatures.records import plain_record
from unisono.parallel.share import Share
from unisono.parallel.trainer import Trainer
from unisono.plan.schedules.action import Action

Batch = tuple[Any, Any] | Share


@plain_record
class NonFinite(NamedTuple):
    stage: int  # of the pipeline
    order: int  # among the stage's modules, by the end of their forward
    text: str


def origin(trainer: Trainer, batch: Batch) -> str:
    """One line that names the origin, over all ranks; every rank calls it."""
    comm = world.world()
    before = nonfinite_parameter(trainer) or _first_of_ranks(_in_batch(batch))
    if before:
        return before
    everyone = enumerate(comm.all_gather_object(_in_step(trainer, batch), only_data=True))
    findings = [(each, rank) for rank, each in everyone if each is not None]
    if not findings:
        return "every module's output is finite: it comes from the loss function"
    (*_, text), rank = min(findings)
    return f"{text} (rank {rank})"


def nonfinite_parameter(trainer: Trainer) -> str:
    """One line that names a parameter that is not finite, over all ranks; every rank calls it."""
    return _first_of_ranks(_in_parameters(trainer))


def _first_of_ranks(mine: str) -> str:
    return next((text for text in world.world().all_gather_object(mine, only_data=True) if text), "")


def _in_parameters(trainer: Trainer) -> str:
    for name, parameter in trainer.optimized():
        if not _is_finite(parameter):
            return f"parameter {name} is not finite before the step: an earlier update made it so"
    return ""


def _in_batch(batch: Batch) -> str:
    pair = batch.batch if isinstance(batch, Share) else batch
    for kind, part in zip(("inputs", "targets"), pair, strict=True):
        if not _is_finite(part):
            return f"the batch's {kind} contain a number that is not finite"
    return ""


def _in_step(trainer: Trainer, batch: Batch) -> NonFinite | None:
    found: list[NonFinite] = []
    orders: dict[str, int] = {}
    stage = 0

    def make_hook(name: str) -> Any:
        def hook(module: nn.Module, arguments: Any, keywords: Any, outputs: Any) -> None:
            order = orders.setdefault(name, len(orders))
            if not _is_finite(outputs) and _is_finite((arguments, keywords)):
                bad = next(leaf for leaf in _numbers(outputs) if not bool(torch.isfinite(leaf).all()))
                kind = "NaN" if bool(torch.isnan(bad).any()) else "infinity"
                where = f"{name or 'the model'} ({type(module).__name__})"
                text = f"{where} returned {kind} for finite inputs, shape {list(bad.shape)}"
                found.append(NonFinite(stage, order, text))

        return hook

    def set_stage(microbatch: int, action: Action | None) -> None:
        nonlocal stage
        stage = 0 if action is None else action.stage

    modules = trainer.model.named_modules()
    handles = [module.register_forward_hook(make_hook(name), with_kwargs=True) for name, module in modules]
    before, trainer.on_microbatch = trainer.on_microbatch, set_stage
    try:
        trainer.zero_grad()
        with torch.random.fork_rng(devices=[]):
            trainer.backward(batch)
    finally:
        trainer.on_microbatch = before
        for handle in handles:
            handle.remove()
    return min(found, default=None)


def _numbers(tree: Any) -> list[torch.Tensor]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]


def _is_finite(tree: Any) -> bool:
    return all(bool(torch.isfinite(leaf.detach()).all()) for leaf in _numbers(tree))
