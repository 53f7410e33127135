"""Cross entropy of logits of which each rank has some classes, without gathering them.

Of a target's logits the ranks reduce three numbers: their maximum, the sum of their exponentials, and the target's own
logit (with label smoothing a fourth, their sum). Gathering would move the logits of all classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unisono.mesh.autograd_collectives import first_order_only

Reduce = Callable[[torch.Tensor, str], torch.Tensor]  # over the ranks that have the other classes; without a gradient


def sharded_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    reduce: Reduce,
    first: int,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    """Logits (..., classes here) and targets (...) -> losses (...), the same on all ranks; 0 where a target is ignored.

    first: the number of the first class here. classes: how many there are on all ranks.
    """
    loss: torch.Tensor = _CrossEntropy.apply(logits, targets, reduce, first, classes, ignore_index, label_smoothing)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        reduce: Reduce,
        first: int,
        classes: int,
        ignore_index: int,
        smoothing: float,
    ) -> torch.Tensor:
        ctx.smoothing, ctx.classes, ctx.dtype = smoothing, classes, logits.dtype
        is_ours = logits.dtype in (torch.float16, torch.bfloat16)
        if is_ours:
            logits = logits.float()  # a sum over the vocabulary is more than half precision can hold
        ignored = targets == ignore_index
        index = targets - first
        elsewhere = ignored | (index < 0) | (index >= logits.shape[-1])
        index = index.masked_fill(elsewhere, 0).unsqueeze(-1)

        has_classes = logits.shape[-1] > 0
        maximum = reduce(logits.amax(-1) if has_classes else logits.new_full(targets.shape, -torch.inf), "max")
        # Of what is as large as the logits, there is one: it is shifted, then exponentials, then probabilities.
        shifted = logits.sub_(maximum.unsqueeze(-1)) if is_ours else logits - maximum.unsqueeze(-1)
        own = shifted.gather(-1, index).squeeze(-1) if has_classes else torch.zeros_like(maximum)
        of_all = [shifted.sum(-1)] if smoothing else []
        exponentials = shifted.exp_()
        sums = [exponentials.sum(-1), own.masked_fill(elsewhere, 0.0), *of_all]
        total, target, *rest = reduce(torch.stack(sums), "sum")

        losses = total.log() - target
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (total.log() - rest[0] / classes)
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), index, elsewhere, ignored)
        return losses.masked_fill(ignored, 0.0).to(ctx.dtype)

    @staticmethod
    @first_order_only(
        "cross entropy of sharded logits", 'keep the head full with a rule {"NAME OF THE HEAD": "replicate"}'
    )
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        probabilities, index, elsewhere, ignored = ctx.saved_tensors
        slope = probabilities - ctx.smoothing / ctx.classes
        if slope.shape[-1]:
            own = (ctx.smoothing - 1) * (~elsewhere).to(slope.dtype)
            slope.scatter_add_(-1, index, own.unsqueeze(-1))
        slope *= grad.masked_fill(ignored, 0.0).unsqueeze(-1)
        return slope.to(ctx.dtype), None, None, None, None, None, None
