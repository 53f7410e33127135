"""VQNet's modules, as far as its distributed programs use them; each is a torch module."""

from __future__ import annotations

from unisono.compat.vqnet.nn import activation as activation
from unisono.compat.vqnet.nn.conv import AvgPool2D as AvgPool2D
from unisono.compat.vqnet.nn.conv import Conv2D as Conv2D
from unisono.compat.vqnet.nn.conv import MaxPool2D as MaxPool2D
from unisono.compat.vqnet.nn.linear import Linear as Linear
from unisono.compat.vqnet.nn.loss import CrossEntropyLoss as CrossEntropyLoss
from unisono.compat.vqnet.nn.loss import MeanSquaredError as MeanSquaredError
from unisono.compat.vqnet.nn.module import Module as Module
from unisono.compat.vqnet.nn.module import ModuleList as ModuleList
from unisono.compat.vqnet.nn.module import Sequential as Sequential
from unisono.compat.vqnet.nn.parameter import Parameter as Parameter
