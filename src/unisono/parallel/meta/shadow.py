"""Running a meta model on real inputs: what a model makes of its inputs alone has numbers, the rest has shapes.

Many models look at their inputs on the way (is there padding, are these positions consecutive?) and never at what comes
of their parameters. Within a Shadow such a model runs without any memory for parameters: an operation on real tensors
is done, one that a meta tensor takes part in gives placeholders, and code that asks for a tensor's device gets the
device that the inputs are on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from unisono.mesh.interception import Interception
from unisono.parallel.precision import PRODUCTS
from unisono.torch_compat import no_torch_function

_META = torch.device("meta")


class OnMeta(Interception):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._surface = DeviceView(device)

    def __enter__(self) -> OnMeta:
        super().__enter__()
        self._surface.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._surface.__exit__(*error)
        super().__exit__(*error)

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with no_torch_function():
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if any(tensor.device == _META for tensor in tensors):
                args, kwargs = tree_map(_emptied, (args, kwargs))
            return func(*args, **kwargs)


def _emptied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.device != _META:
        return torch.empty_like(leaf, device=_META)
    return _META if isinstance(leaf, torch.device) else leaf


class DeviceView(TorchFunctionMode):
    """Tensors look as if they were on the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _DEVICE:
            return self._device
        if getattr(func, "__name__", "") in _RECURRENT and any(map(_is_placeholder, tree_leaves(args))):
            args = tree_map(_emptied, tuple(args))
        name, device = getattr(func, "__name__", ""), self._device.type
        if name in PRODUCTS and torch.is_autocast_enabled(device) and any(map(_is_placeholder, tree_leaves(args))):
            dtype = torch.get_autocast_dtype(device)  # torch's autocast leaves tensors on meta alone
            args, kwargs = tree_map(lambda leaf: leaf.to(dtype) if _is_float32(leaf) else leaf, (tuple(args), kwargs))
        return func(*args, **(kwargs or {}))


def _is_float32(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32


def _is_placeholder(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device == _META


_DEVICE = torch.Tensor.device.__get__
# They compare the devices of what they are given before any operation is dispatched.
_RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
