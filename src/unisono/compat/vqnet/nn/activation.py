"""VQNet's activations: torch's, under its spelling."""

from __future__ import annotations

from torch import nn

from unisono.compat.vqnet.nn.module import Module
from unisono.compat.vqnet.vqnet_names import missing_names


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


class Softplus(Module, nn.Softplus):
    def __init__(self, name: str = "") -> None:
        nn.Softplus.__init__(self)
        self.name = name


class Softsign(Module, nn.Softsign):
    def __init__(self, name: str = "") -> None:
        nn.Softsign.__init__(self)
        self.name = name


class HardSigmoid(Module, nn.Hardsigmoid):
    def __init__(self, name: str = "") -> None:
        nn.Hardsigmoid.__init__(self)
        self.name = name


class ELU(Module, nn.ELU):
    def __init__(self, alpha: float = 1.0, name: str = "") -> None:
        nn.ELU.__init__(self, alpha)
        self.name = name


class Gelu(Module, nn.GELU):
    def __init__(self, approximate: str = "tanh", name: str = "") -> None:
        nn.GELU.__init__(self, approximate)
        self.name = name


__getattr__ = missing_names(__name__)
