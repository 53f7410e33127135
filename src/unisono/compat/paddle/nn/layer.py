"""Layer: torch's Module with Paddle's names. The outermost call of one is where a plan takes hold.

A program calls its model with Tensors. What is called within has torch's own tensors, with Paddle's methods for the
program's code (methods.py), and the call's results are Tensors again. A plan is bound to
a layer (distributed/binding.py) by fleet, by group_sharded_parallel, or by the marks that its forward makes: the first
mark ends the call, the plan is made, and the call is made again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from unisono.compat.paddle.methods import METHODS
from unisono.compat.paddle.tensor import has_tensor, plain, wrapped


class _Calls(threading.local):
    outermost: Layer | None = None  # the layer that the program has called, while its forward runs without a plan


_calls = _Calls()
on_marks: list[Callable[[Layer, Any], Any]] = []  # makes the binding of a layer whose forward has marks: binding.py
marked_parameters = WeakTensorKeyDictionary()  # with the meshes that they were marked on outside a forward


class MarkFound(Exception):
    """A forward without a plan has come to a mark, on this mesh."""

    def __init__(self, mesh: Any) -> None:
        super().__init__("a mark in a forward that has no plan yet")
        self.mesh = mesh


def is_waiting_for_marks() -> bool:
    """Whether a mark made now is one of a program's own call, which has no plan yet."""
    return _calls.outermost is not None


@contextlib.contextmanager
def waiting_for_marks(layer: Layer) -> Iterator[None]:
    before, _calls.outermost = _calls.outermost, layer
    try:
        yield
    finally:
        _calls.outermost = before


def freeze_stopped(module: nn.Module) -> None:
    """Parameters whose stop_gradient a program has set are trained, or not, accordingly."""
    for parameter in module.parameters():
        stops = vars(parameter).get("stop_gradient")
        if stops is not None and parameter.requires_grad == stops:
            parameter.requires_grad_(not stops)


class Layer(nn.Module):
    """As paddle.nn.Layer; a torch Module in all else."""

    binding: Any = None  # the plan that calls of this layer run under, see distributed/binding.py

    def __init__(self, name_scope: str | None = None, dtype: str = "float32") -> None:
        super().__init__()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _calls.outermost is not None or not has_tensor((args, kwargs)):
            with METHODS:
                return super().__call__(*args, **kwargs)
        args, kwargs = plain((args, kwargs))
        if self.binding is None:
            freeze_stopped(self)
            try:
                with METHODS, waiting_for_marks(self):
                    self._look_for_marks()
                    return wrapped(super().__call__(*args, **kwargs))
            except MarkFound as found:
                self.binding = on_marks[0](self, found.mesh)
        return wrapped(self.binding.call(args, kwargs))

    def _look_for_marks(self) -> None:
        for parameter in self.parameters() if len(marked_parameters) else ():
            if parameter in marked_parameters:
                raise MarkFound(marked_parameters[parameter])

    def sublayers(self, include_self: bool = False) -> list[nn.Module]:
        return [module for module in self.modules() if include_self or module is not self]

    def add_sublayer(self, name: str, sublayer: nn.Module) -> nn.Module:
        self.add_module(name, sublayer)
        return sublayer

    def add_parameter(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        self.register_parameter(name, parameter)
        return parameter

    def clear_gradients(self) -> None:
        if self.binding is not None:
            self.binding.clear_gradients()
        else:
            self.zero_grad()

    def set_state_dict(self, state_dict: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> None:
        self.load_state_dict(plain(state_dict))

    set_dict = load_dict = set_state_dict


class Sequential(Layer, nn.Sequential):
    """Layers one after the other; also named ones, as ("first", layer)."""

    def __init__(self, *layers: Any) -> None:
        Layer.__init__(self)
        for number, layer in enumerate(layers):
            name, layer = layer if isinstance(layer, tuple) else (str(number), layer)
            self.add_module(name, layer)

    def forward(self, x: Any) -> Any:
        for layer in self:
            x = layer(x)
        return x


class LayerList(Layer, nn.ModuleList):
    def __init__(self, sublayers: Any = None) -> None:
        Layer.__init__(self)
        self.extend(sublayers or [])
