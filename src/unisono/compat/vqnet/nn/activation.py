"""VQNet's activations: torch's, under its spelling."""

from __future__ import annotations

from torch import nn

from unisono.compat.vqnet.nn.module import Module


class ReLu(Module, nn.ReLU):
    def __init__(self, name: str = "") -> None:
        nn.ReLU.__init__(self)
        self.name = name


class Sigmoid(Module, nn.Sigmoid):
    def __init__(self, name: str = "") -> None:
        nn.Sigmoid.__init__(self)
        self.name = name


class Tanh(Module, nn.Tanh):
    def __init__(self, name: str = "") -> None:
        nn.Tanh.__init__(self)
        self.name = name


class LeakyReLu(Module, nn.LeakyReLU):
    def __init__(self, alpha: float = 0.01, name: str = "") -> None:
        nn.LeakyReLU.__init__(self, alpha)
        self.name = name


class Softmax(Module, nn.Softmax):
    def __init__(self, axis: int = -1, name: str = "") -> None:
        nn.Softmax.__init__(self, axis)
        self.name = name
