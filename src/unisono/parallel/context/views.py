"""Views that count on the full sequence, in a model that holds some of its tokens.

After its blocks a model may put its hidden states into the shape of its inputs, as Hugging Face's GPT-2 does:

    output_shape = (-1, *input_ids.shape[1:], width)
    hidden = hidden.view(output_shape)

On a rank's tokens that shape is wrong in one number, the length of the sequence, and in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_VIEWS = {torch.Tensor.view, torch.Tensor.reshape, torch.reshape}


class TokenViews(TorchFunctionMode):
    """While active, a view of (batch, held, ...) as (batch, length, ...) is one as (batch, held, ...)."""

    def __init__(self, held: int, length: int) -> None:
        super().__init__()
        self._held, self._length = held, length

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _VIEWS and len(args) > 1 and not kwargs:
            shape = args[1] if isinstance(args[1], tuple | list) else args[1:]
            if self._is_of_full(args[0], shape):
                return func(args[0], (args[0].shape[0], self._held, *shape[2:]))
        return func(*args, **(kwargs or {}))

    def _is_of_full(self, tensor: torch.Tensor, shape: Sequence[Any]) -> bool:
        """Whether only the length stands between the shape and the tensor."""
        if len(shape) < 2 or not all(isinstance(size, int) for size in shape) or -1 in shape[1:]:
            return False
        return (
            tensor.dim() >= 2
            and tensor.shape[1] == self._held != self._length == shape[1]
            and shape[0] in (-1, tensor.shape[0])
            and prod(shape[2:]) == prod(tensor.shape[2:])
        )
