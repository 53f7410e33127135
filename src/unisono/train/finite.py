"""Which module first gave a number that is none: for a run that stops because its loss is NaN or infinite.

The step is run again with a look at every module's inputs and outputs; random numbers belong to the step, so it goes as
it went. The culprit took finite inputs and gave something else. So may others after it, where ranks cut samples or
sequences: what they get from other ranks is no input of theirs. The first is the one that one device would meet first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from unisono.comm.rendezvous import world
from unisono.parallel.share import Share
from unisono.parallel.trainer import Trainer
from unisono.plan.schedules.action import Action

Batch = tuple[Any, Any] | Share


class Finding(NamedTuple):
    stage: int  # of the pipeline
    place: int  # among the stage's modules, in the order in which they end
    told: str


def first_culprit(trainer: Trainer, batch: Batch) -> str:
    """One line on where it began, over all ranks; every rank calls it."""
    comm = world.world()
    before = broken_parameter(trainer) or _first_told(_in_batch(batch))
    if before:
        return before
    everyone = enumerate(comm.all_gather_object(_in_step(trainer, batch)))
    findings = [(each, rank) for rank, each in everyone if each is not None]
    if not findings:
        return "every module's output is finite: the loss function itself made it"
    (*_, told), rank = min(findings)
    return f"{told} (rank {rank})"


def broken_parameter(trainer: Trainer) -> str:
    """One line on a parameter that is not finite, over all ranks; every rank calls it."""
    return _first_told(_in_parameters(trainer))


def _first_told(mine: str) -> str:
    return next((told for told in world.world().all_gather_object(mine) if told), "")


def _in_parameters(trainer: Trainer) -> str:
    for name, parameter in trainer.optimized():
        if not _is_finite(parameter):
            return f"parameter {name} is not finite before the step: an earlier update broke it"
    return ""


def _in_batch(batch: Batch) -> str:
    pair = batch.batch if isinstance(batch, Share) else batch
    for kind, part in zip(("inputs", "targets"), pair, strict=True):
        if not _is_finite(part):
            return f"the batch's {kind} hold a number that is not finite"
    return ""


def _in_step(trainer: Trainer, batch: Batch) -> Finding | None:
    found: list[Finding] = []
    places: dict[str, int] = {}
    stage = 0

    def look(name: str) -> Any:
        def hook(module: nn.Module, arguments: Any, keywords: Any, outputs: Any) -> None:
            place = places.setdefault(name, len(places))
            if not _is_finite(outputs) and _is_finite((arguments, keywords)):
                bad = next(leaf for leaf in _numbers(outputs) if not bool(torch.isfinite(leaf).all()))
                kind = "NaN" if bool(torch.isnan(bad).any()) else "an infinite number"
                told = f"{name or 'the model'} ({type(module).__name__}) gave {kind} from finite inputs"
                found.append(Finding(stage, place, f"{told}, shape {list(bad.shape)}"))

        return hook

    def turn_to(microbatch: int, action: Action | None) -> None:
        nonlocal stage
        stage = 0 if action is None else action.stage

    handles = [
        module.register_forward_hook(look(name), with_kwargs=True) for name, module in trainer.model.named_modules()
    ]
    before, trainer.on_microbatch = trainer.on_microbatch, turn_to
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
