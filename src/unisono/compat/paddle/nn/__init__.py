"""paddle.nn.

layer        Layer, Sequential, LayerList; the outermost call of a layer is where a plan takes hold
layers       Linear (its weight is (inputs, outputs)) and the others
functional   functions of tensors, with labels of shape [B, 1]
initializer  what parameters are drawn with
"""

from __future__ import annotations

from unisono.compat.paddle.nn import functional as functional
from unisono.compat.paddle.nn import initializer as initializer
from unisono.compat.paddle.nn.layer import Layer as Layer
from unisono.compat.paddle.nn.layer import LayerList as LayerList
from unisono.compat.paddle.nn.layer import Sequential as Sequential
from unisono.compat.paddle.nn.layers import GELU as GELU
from unisono.compat.paddle.nn.layers import CrossEntropyLoss as CrossEntropyLoss
from unisono.compat.paddle.nn.layers import Dropout as Dropout
from unisono.compat.paddle.nn.layers import Embedding as Embedding
from unisono.compat.paddle.nn.layers import LayerNorm as LayerNorm
from unisono.compat.paddle.nn.layers import Linear as Linear
from unisono.compat.paddle.nn.layers import MSELoss as MSELoss
from unisono.compat.paddle.nn.layers import ReLU as ReLU
from unisono.compat.paddle.paddle_names import missing_names

__getattr__ = missing_names(__name__)
