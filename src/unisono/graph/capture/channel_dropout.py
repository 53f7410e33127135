"""Dropout of channels, and that of SELU nets, spelled out for a trace: as products with plain dropouts.

torch has ops of their own for them, whose numbers depend on who draws. What stands here draws a plain dropout of the
numbers that a running model draws (mesh/random/dropout.py), and its ops can be sharded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.nn.functional as F

from unisono.torch_patches import PatchSet

_LOWEST = -1.7580993408473766  # of SELU

Dropout = Callable[..., torch.Tensor]


def channel_dropout_decomposed() -> contextlib.AbstractContextManager[None]:
    """In the block, F.dropout1d and its kin are made of F.dropout."""
    forms = {(F, name): make(getattr(F, name)) for name, make in _FORMS.items()}
    return PatchSet(forms, why="dropouts of channels are traced as plain dropouts", until="the trace is made")


def _channels(plain_dims: int) -> Callable[[Dropout], Dropout]:
    """plain_dims: how many dims an input without a batch has."""

    def make(original: Dropout) -> Dropout:
        def dropped(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
            if not training or not 0 < p <= 1:
                return original(x, p, training, inplace)
            # torch takes three dims in dropout2d for (batch, channels, length), not for an input without a batch.
            channels = 1 if x.dim() == plain_dims != 3 else 2
            noise = _dropped_ones(x, channels, p)
            return x.mul_(noise) if inplace else x * noise

        return dropped

    return make


def _alpha(by_channel: bool) -> Callable[[Dropout], Dropout]:
    """Dropped elements take SELU's lowest value; a scale and a shift keep mean and variance."""

    def make(original: Dropout) -> Dropout:
        def dropped(x: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> torch.Tensor:
            if not training or not 0 < p <= 1:
                return original(x, p, training, inplace)
            kept = _dropped_ones(x, 2 if by_channel else x.dim(), p) > 0
            scale = 0.0 if p == 1 else ((1 - p) * (1 + p * _LOWEST**2)) ** -0.5
            made = torch.where(kept, x, torch.full_like(x, _LOWEST)) * scale - scale * p * _LOWEST
            return x.copy_(made) if inplace else made

        return dropped

    return make


def _dropped_ones(x: torch.Tensor, dims: int, p: float) -> torch.Tensor:
    noise = F.dropout(x.new_ones(x.shape[:dims]), p, True)
    return noise.reshape(*noise.shape, *[1] * (x.dim() - dims))


_FORMS: dict[str, Callable[[Dropout], Dropout]] = {
    "dropout1d": _channels(2),
    "dropout2d": _channels(3),
    "dropout3d": _channels(4),
    "alpha_dropout": _alpha(by_channel=False),
    "feature_alpha_dropout": _alpha(by_channel=True),
}
