"""VQNet's modules, as far as its distributed programs use them; each is a torch module."""

from __future__ import annotations

from unisono.compat.vqnet.nn import activation as activation
from unisono.compat.vqnet.nn import loss as loss
from unisono.compat.vqnet.nn.activation import ELU as ELU
from unisono.compat.vqnet.nn.activation import Gelu as Gelu
from unisono.compat.vqnet.nn.activation import HardSigmoid as HardSigmoid
from unisono.compat.vqnet.nn.activation import LeakyReLu as LeakyReLu
from unisono.compat.vqnet.nn.activation import ReLu as ReLu
from unisono.compat.vqnet.nn.activation import Sigmoid as Sigmoid
from unisono.compat.vqnet.nn.activation import Softmax as Softmax
from unisono.compat.vqnet.nn.activation import Softplus as Softplus
from unisono.compat.vqnet.nn.activation import Softsign as Softsign
from unisono.compat.vqnet.nn.activation import Tanh as Tanh
from unisono.compat.vqnet.nn.conv import AvgPool2D as AvgPool2D
from unisono.compat.vqnet.nn.conv import Conv2D as Conv2D
from unisono.compat.vqnet.nn.conv import MaxPool2D as MaxPool2D
from unisono.compat.vqnet.nn.layers import GRU as GRU
from unisono.compat.vqnet.nn.layers import LSTM as LSTM
from unisono.compat.vqnet.nn.layers import RNN as RNN
from unisono.compat.vqnet.nn.layers import BatchNorm1d as BatchNorm1d
from unisono.compat.vqnet.nn.layers import BatchNorm2d as BatchNorm2d
from unisono.compat.vqnet.nn.layers import Dropout as Dropout
from unisono.compat.vqnet.nn.layers import Embedding as Embedding
from unisono.compat.vqnet.nn.layers import GroupNorm as GroupNorm
from unisono.compat.vqnet.nn.layers import Identity as Identity
from unisono.compat.vqnet.nn.layers import LayerNorm1d as LayerNorm1d
from unisono.compat.vqnet.nn.layers import LayerNormNd as LayerNormNd
from unisono.compat.vqnet.nn.linear import Linear as Linear
from unisono.compat.vqnet.nn.loss import BinaryCrossEntropy as BinaryCrossEntropy
from unisono.compat.vqnet.nn.loss import CategoricalCrossEntropy as CategoricalCrossEntropy
from unisono.compat.vqnet.nn.loss import CrossEntropyLoss as CrossEntropyLoss
from unisono.compat.vqnet.nn.loss import MeanSquaredError as MeanSquaredError
from unisono.compat.vqnet.nn.loss import NLL_Loss as NLL_Loss
from unisono.compat.vqnet.nn.loss import SoftmaxCrossEntropy as SoftmaxCrossEntropy
from unisono.compat.vqnet.nn.module import Module as Module
from unisono.compat.vqnet.nn.module import ModuleList as ModuleList
from unisono.compat.vqnet.nn.module import Sequential as Sequential
from unisono.compat.vqnet.nn.parameter import Parameter as Parameter
from unisono.compat.vqnet.vqnet_names import missing_names

__getattr__ = missing_names(__name__)
