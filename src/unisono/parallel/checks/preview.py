"""A look ahead, before any rank communicates: whether the loss can take what the model returns.

A meta copy of the model (on torch's "meta" device: no memory, no time) is run on the example. What fails there proves
nothing, as some models need values; so a loss that fails is asked once more, with the model's real output for two
samples (with made-up numbers of that form, where the model itself is without values), and only then is the job refused.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from unisono.errors import UsageError
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.checks.parameter_reads import ParameterReads
from unisono.parallel.expert.expert import collect_aux
from unisono.parallel.inputs import call
from unisono.parallel.loss.loss import GlobalLoss, Loss
from unisono.parallel.meta.meta_tensors import meta_copy, to_meta
from unisono.parallel.meta.shapes import KnownShapes
from unisono.parallel.pipeline.parameter_usage import left_as_it_was
from unisono.parallel.share import BatchDim, batch_slice, first_batch_size

_SAMPLES = 2


def require_fitting_loss(
    model: nn.Module,
    loss: Loss,
    example: tuple[Any, Any],
    batch_dim: BatchDim = 0,
    reads: ParameterReads | None = None,
) -> None:
    """UsageError where loss(outputs, targets) fails on what the model returns for the example, or where it reads
    parameters in a way that `reads` refuses."""
    if not isinstance(example, tuple | list) or len(example) != 2:
        raise UsageError(f"the example is a {type(example).__name__}; expected a batch: (inputs, targets)")
    asked, watched = GlobalLoss(loss), reads or contextlib.nullcontext()
    with torch.no_grad():
        try:
            with no_side_effects(model), torch.device("meta"), KnownShapes():
                inputs, targets = to_meta(tuple(example))
                outputs = call(meta_copy(model), inputs)
        except Exception:
            if reads is None:
                return  # a model that needs values: its first step shows it
        else:
            with contextlib.suppress(Exception), no_side_effects(loss), torch.device("meta"), KnownShapes(), watched:
                asked(outputs, targets)
                return
        samples = batch_slice(tuple(example), 0, min(_SAMPLES, first_batch_size(example, batch_dim)), batch_dim)
        if any(parameter.is_meta for parameter in model.parameters()):
            made_up = _made_up(model, samples[0])
            if made_up is not None:
                with no_side_effects(loss), watched:
                    asked(made_up, samples[1])
            return
        try:
            with left_as_it_was(model):
                outputs = call(model, samples[0])
        except Exception:
            return
        finally:
            collect_aux(model)  # nobody else will
        with no_side_effects(loss), watched:
            asked(outputs, samples[1])


def _made_up(model: nn.Module, inputs: Any) -> Any:
    """Numbers in the form of what a model that has no values would return; None where the form is not known."""
    generator = torch.Generator().manual_seed(0)

    def made_up(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        numbers = torch.rand(leaf.shape, generator=generator, device="cpu", dtype=torch.float32)
        return numbers.to(leaf.dtype)

    try:
        with no_side_effects(model), torch.device("meta"), KnownShapes():
            outputs = call(meta_copy(model), to_meta(inputs))
    except Exception:
        return None
    if not all(isinstance(leaf, torch.Tensor | int | float | str | None) for leaf in tree_leaves(outputs)):
        return None
    return tree_map(made_up, outputs)
