"""Parameters, which VQNet makes from a shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from unisono.compat.vqnet.dtype import Dtype, dtype_of
from unisono.compat.vqnet.nn.initial import Initializer, fill
from unisono.compat.vqnet.tensor.qtensor import plain


def Parameter(
    shape: Sequence[int] | torch.Tensor, initializer: Initializer | None = None, dtype: Dtype | None = None
) -> nn.Parameter:
    """A trainable parameter of that shape, drawn from the normal distribution unless an initializer fills it.

    A tensor instead of the shape is the parameter's first value.
    """
    if isinstance(shape, torch.Tensor):
        return nn.Parameter(plain(shape).detach().clone())
    made = torch.randn(tuple(shape), dtype=None if dtype is None else dtype_of(dtype))
    fill(made, initializer)
    return nn.Parameter(made)
