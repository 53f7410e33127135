"""Tensor: a torch tensor that also answers to MindSpore's names."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from unisono.compat.language import say
from unisono.errors import UsageError


class Tensor(torch.Tensor):
    """`Tensor(input_data, dtype)`; what is computed from one is one."""

    @staticmethod
    def __new__(
        cls: type[Tensor],
        input_data: Any = None,
        dtype: torch.dtype | None = None,
        shape: Any = None,
        init: Any = None,
    ) -> Tensor:
        if input_data is None or shape is not None or init is not None:
            raise UsageError(
                say(
                    "Tensor(shape=, init=) is filled later in MindSpore; here use initializer(init, shape), "
                    "or give numbers, an array or a tensor",
                    "Tensor(shape=, init=)：MindSpore 稍后才填充它；这里请用 initializer(init, shape)，或给出"
                    "数、数组或张量",
                )
            )
        if isinstance(input_data, torch.Tensor):
            made = plain(input_data).detach().to(dtype, copy=True) if dtype else plain(input_data).detach().clone()
        else:
            made = torch.tensor(np.asarray(input_data), dtype=dtype)
        return made.as_subclass(cls)

    def asnumpy(self) -> np.ndarray:
        return plain(self).detach().cpu().numpy()

    def astype(self, dtype: torch.dtype) -> Any:
        return self.to(dtype)

    def expand_dims(self, axis: int) -> Any:
        return self.unsqueeze(axis)


def plain(value: Any) -> Any:
    """The same tensors, in any structure, as torch's own class: they share memory and history."""
    return tree_map(lambda leaf: leaf.as_subclass(torch.Tensor) if isinstance(leaf, Tensor) else leaf, value)


def wrapped(value: Any) -> Any:
    """The same tensors, in any structure, as MindSpore's."""
    return tree_map(lambda leaf: leaf.as_subclass(Tensor) if isinstance(leaf, torch.Tensor) else leaf, value)
