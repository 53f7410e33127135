"""Tensors, parameters and their initial values.

tensor       Tensor: torch's, with MindSpore's names
parameter    Parameter, which has a name
initializer  initializer("normal", shape) and its kin
dtype        float32, int32, ...
seed         set_seed
"""

from __future__ import annotations

from unisono.compat.mindspore.common import dtype as dtype
from unisono.compat.mindspore.common import initializer as initializer
from unisono.compat.mindspore.common.parameter import Parameter as Parameter
from unisono.compat.mindspore.common.parameter import ParameterTuple as ParameterTuple
from unisono.compat.mindspore.common.seed import get_seed as get_seed
from unisono.compat.mindspore.common.seed import set_seed as set_seed
from unisono.compat.mindspore.common.tensor import Tensor as Tensor
from unisono.compat.mindspore.mindspore_names import missing_names

__getattr__ = missing_names(__name__)
