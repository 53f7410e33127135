"""QTensor: a torch tensor that also answers to VQNet's names."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from unisono.compat.vqnet.device import DEV_CPU, DEV_GPU_0, Device, device_of
from unisono.compat.vqnet.dtype import Dtype, dtype_of


class ElementCount(int):
    """How many elements there are, as VQNet's `size`; called, the shape, as torch's."""

    shape: torch.Size

    def __new__(cls, shape: torch.Size) -> ElementCount:
        made = super().__new__(cls, math.prod(shape))
        made.shape = shape
        return made

    def __call__(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]


class QTensor(torch.Tensor):
    """`QTensor(data, requires_grad, nodes, device, dtype, name)`; what is computed from one is one.

    `backward()` of more than one element starts from ones, and devices and dtypes may be VQNet's numbers.
    """

    @staticmethod
    def __new__(
        cls: type[QTensor],
        data: Any,
        requires_grad: bool = False,
        nodes: Any = None,
        device: Device = DEV_CPU,
        dtype: Dtype | None = None,
        name: str = "",
    ) -> QTensor:
        wanted = None if dtype is None else dtype_of(dtype)
        where = device_of(device)
        if isinstance(data, torch.Tensor):
            made = plain(data).detach().to(where, wanted, copy=True)
        else:
            made = torch.tensor(data, dtype=wanted, device=where)
        return made.as_subclass(cls).requires_grad_(requires_grad)

    @property
    def size(self) -> ElementCount:
        return ElementCount(self.shape)

    @property
    def requires_grad(self) -> bool:
        return torch.Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        """May also be set where it is so already by what the tensor was computed from; its gradient is kept then."""
        if wanted and self.requires_grad and not self.is_leaf:
            self.retain_grad()
        else:
            torch.Tensor.requires_grad.__set__(self, wanted)  # type: ignore[attr-defined]

    def backward(self, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
        if gradient is None and self.numel() != 1:
            gradient = torch.ones_like(self)
        super().backward(gradient, *args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return super().to(*[_device_or(each) for each in args], **_with_device(kwargs))

    def toGPU(self, device: Device = DEV_GPU_0) -> Any:
        return self.to(device)

    def toCPU(self) -> Any:
        return self.to(DEV_CPU)

    def astype(self, dtype: Dtype) -> Any:
        return self.to(dtype_of(dtype))

    def to_numpy(self) -> np.ndarray:
        return plain(self).detach().cpu().numpy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.is_leaf:
            return super().__deepcopy__(memo)  # which refuses, as for any tensor
        twin = memo[id(self)] = plain(self).detach().clone().as_subclass(type(self)).requires_grad_(self.requires_grad)
        return twin


def _device_or(given: Any) -> Any:
    """A number is a device; everything else is as torch takes it."""
    return device_of(given) if isinstance(given, int) and not isinstance(given, bool) else given


def _with_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": _device_or(kwargs["device"])} if "device" in kwargs else kwargs


def plain(value: Any) -> Any:
    """The same tensors, in any structure, as torch's own class: they share memory and history."""
    return tree_map(lambda leaf: leaf.as_subclass(torch.Tensor) if isinstance(leaf, QTensor) else leaf, value)


def wrapped(value: Any) -> Any:
    """The same tensors, in any structure, as QTensors."""
    return tree_map(lambda leaf: leaf.as_subclass(QTensor) if isinstance(leaf, torch.Tensor) else leaf, value)
