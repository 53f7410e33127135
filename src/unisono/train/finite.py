"""Which module first gave a number that is none: for a run that stops because its loss is NaN or infinite.

The step's forward is run again with a look at every module's inputs and outputs; random numbers belong to the step, so
it goes as it went. The culprit took finite inputs and gave something else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from unisono.comm import world
from unisono.parallel.share import Share
from unisono.parallel.trainer import Trainer

Batch = tuple[Any, Any] | Share


class Finding(NamedTuple):
    stage: int  # of the pipeline
    told: str


def first_culprit(trainer: Trainer, batch: Batch) -> str:
    """One line on where it began, over all ranks; every rank calls it."""
    comm = world.world()
    before = [told for told in comm.all_gather_object(_in_parameters(trainer) or _in_batch(batch)) if told]
    if before:
        return before[0]
    everyone = enumerate(comm.all_gather_object(_in_forward(trainer, batch)))
    findings = [(each, rank) for rank, each in everyone if each is not None]
    if not findings:
        return "every module's output is finite: the loss function itself made it"
    (_, told), rank = min(findings)
    return f"{told} (rank {rank})"


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


def _in_forward(trainer: Trainer, batch: Batch) -> Finding | None:
    seen: list[Finding] = []
    stage = trainer.mesh.index("pp")

    def look(name: str) -> Any:
        def hook(module: nn.Module, arguments: Any, keywords: Any, outputs: Any) -> None:
            if not seen and not _is_finite(outputs) and _is_finite((arguments, keywords)):
                bad = next(leaf for leaf in _numbers(outputs) if not bool(torch.isfinite(leaf).all()))
                kind = "NaN" if bool(torch.isnan(bad).any()) else "an infinite number"
                told = f"{name or 'the model'} ({type(module).__name__}) gave {kind} from finite inputs"
                seen.append(Finding(stage, f"{told}, shape {list(bad.shape)}"))

        return hook

    handles = [
        module.register_forward_hook(look(name), with_kwargs=True) for name, module in trainer.model.named_modules()
    ]
    try:
        with torch.random.fork_rng(devices=[]):
            trainer.backward(batch)
    finally:
        for handle in handles:
            handle.remove()
    return seen[0] if seen else None


def _numbers(tree: Any) -> list[torch.Tensor]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]


def _is_finite(tree: Any) -> bool:
    return all(bool(torch.isfinite(leaf.detach()).all()) for leaf in _numbers(tree))
