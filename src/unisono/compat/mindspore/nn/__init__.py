"""MindSpore's cells, layers, losses and optimizers.

cell        Cell, SequentialCell, CellList
layer       Dense, Conv2d, ReLU, ...
loss        MSELoss, SoftmaxCrossEntropyWithLogits, ...
optim       Momentum, SGD, Adam, AdamWeightDecay
dynamic_lr  a learning rate for each step
"""

from __future__ import annotations

from unisono.compat.mindspore.mindspore_names import missing_names
from unisono.compat.mindspore.nn.cell import Cell as Cell
from unisono.compat.mindspore.nn.cell import CellList as CellList
from unisono.compat.mindspore.nn.cell import SequentialCell as SequentialCell
from unisono.compat.mindspore.nn.dynamic_lr import cosine_decay_lr as cosine_decay_lr
from unisono.compat.mindspore.nn.dynamic_lr import exponential_decay_lr as exponential_decay_lr
from unisono.compat.mindspore.nn.dynamic_lr import piecewise_constant_lr as piecewise_constant_lr
from unisono.compat.mindspore.nn.dynamic_lr import warmup_lr as warmup_lr
from unisono.compat.mindspore.nn.layer import GELU as GELU
from unisono.compat.mindspore.nn.layer import AvgPool2d as AvgPool2d
from unisono.compat.mindspore.nn.layer import BatchNorm1d as BatchNorm1d
from unisono.compat.mindspore.nn.layer import BatchNorm2d as BatchNorm2d
from unisono.compat.mindspore.nn.layer import Conv2d as Conv2d
from unisono.compat.mindspore.nn.layer import Dense as Dense
from unisono.compat.mindspore.nn.layer import Dropout as Dropout
from unisono.compat.mindspore.nn.layer import Embedding as Embedding
from unisono.compat.mindspore.nn.layer import Flatten as Flatten
from unisono.compat.mindspore.nn.layer import LayerNorm as LayerNorm
from unisono.compat.mindspore.nn.layer import MaxPool2d as MaxPool2d
from unisono.compat.mindspore.nn.layer import ReLU as ReLU
from unisono.compat.mindspore.nn.layer import Sigmoid as Sigmoid
from unisono.compat.mindspore.nn.layer import Softmax as Softmax
from unisono.compat.mindspore.nn.layer import Tanh as Tanh
from unisono.compat.mindspore.nn.loss import CrossEntropyLoss as CrossEntropyLoss
from unisono.compat.mindspore.nn.loss import L1Loss as L1Loss
from unisono.compat.mindspore.nn.loss import LossBase as LossBase
from unisono.compat.mindspore.nn.loss import MSELoss as MSELoss
from unisono.compat.mindspore.nn.loss import SoftmaxCrossEntropyWithLogits as SoftmaxCrossEntropyWithLogits
from unisono.compat.mindspore.nn.optim import SGD as SGD
from unisono.compat.mindspore.nn.optim import Adam as Adam
from unisono.compat.mindspore.nn.optim import AdamWeightDecay as AdamWeightDecay
from unisono.compat.mindspore.nn.optim import Momentum as Momentum
from unisono.compat.mindspore.nn.optim import Optimizer as Optimizer

__getattr__ = missing_names(__name__)
