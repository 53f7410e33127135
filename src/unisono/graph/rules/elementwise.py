"""Ops that treat elements alone, broadcasting as torch does.

They can be sharded along any dim of the result: an input is sharded there too, unless it is broadcast along that dim.
Those that are linear also take sums in parts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import Shard

from unisono.graph.rules.call import OpCall, Shape
from unisono.graph.rules.option import REPLICATE, SUM, Option
from unisono.graph.rules.registry import rule
from unisono.mesh.placement import Placement


def aligned(shape: Shape, result: Shape, dim: int) -> Placement:
    """The placement of an input of that shape where the result, to which it is broadcast, is sharded along `dim`."""
    own = dim - (len(result) - len(shape))
    return Shard(own) if own >= 0 and shape[own] == result[dim] else REPLICATE


def sharded_alike(call: OpCall) -> Iterator[Option]:
    for dim in range(len(call.result)):
        yield Option(
            tuple(aligned(shape, call.result, dim) for shape in call.shapes), (Shard(dim),) * len(call.results)
        )


_NONLINEAR = (
    "relu", "silu", "gelu", "tanh", "sigmoid", "exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt",
    "reciprocal", "abs", "sin", "cos", "tan", "asin", "acos", "atan", "erf", "erfc", "sign", "floor", "ceil",
    "round", "trunc", "pow", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "elu", "celu", "selu",
    "leaky_relu", "hardtanh", "hardsigmoid", "hardswish", "mish", "softplus", "relu6", "logical_not",
    "logical_and", "logical_or", "logical_xor", "bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor",
    "__and__", "__or__", "__xor__", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite",
    "floor_divide", "remainder", "fmod", "square", "log_sigmoid", "sinh", "cosh", "atan2", "frac", "sgn",
    "logit", "nan_to_num", "where.ScalarOther", "where.ScalarSelf", "where.Scalar", "masked_fill.Scalar",
    "hardshrink", "softshrink", "threshold", "addcmul", "addcdiv", "lerp", "rsub.Scalar", "add.Scalar",
    "sub.Scalar", "special_expm1", "bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__",
    "min.other", "max.other",
)  # fmt: skip


@rule(*(f"aten.{name}" for name in _NONLINEAR))
def elementwise(call: OpCall) -> Iterator[Option]:
    yield from sharded_alike(call)


@rule("aten.prelu")
def prelu(call: OpCall) -> Iterator[Option]:
    """A weight for all elements, or one a channel; channels are dim 1."""
    for dim in range(len(call.result)):
        weight = Shard(0) if dim == 1 and call.shape("weight") == call.result[1:2] else REPLICATE
        yield call.option(Shard(dim), self=Shard(dim), weight=weight)


_LINEAR = (
    "neg",
    "clone",
    "contiguous",
    "alias",
    "detach",
    "positive",
    "lift_fresh_copy",
    "lift_fresh",
    "real",
    "conj",
    "_conj",
)


@rule(*(f"aten.{name}" for name in _LINEAR))
def linear_unary(call: OpCall) -> Iterator[Option]:
    yield from sharded_alike(call)
    yield Option((SUM,), (SUM,))


@rule("aten.to", "aten._to_copy", "aten.type_as")
def cast(call: OpCall) -> Iterator[Option]:
    """A sum in parts may be cast to what is no coarser."""
    yield from sharded_alike(call)
    source, target = call.tensors[0].meta["val"].dtype, call.results[0].dtype
    if source.is_floating_point and target.is_floating_point and target.itemsize >= source.itemsize:
        yield Option((SUM, *(REPLICATE,) * (len(call.tensors) - 1)), (SUM,))


@rule("aten.mul", "aten.multiply")
def mul(call: OpCall) -> Iterator[Option]:
    yield from sharded_alike(call)
    if len(call.tensors) == 1:
        yield Option((SUM,), (SUM,))
    else:
        yield Option((SUM, REPLICATE), (SUM,))
        yield Option((REPLICATE, SUM), (SUM,))


@rule("aten.div.Tensor", "aten.div.Scalar", "aten.true_divide")
def div(call: OpCall) -> Iterator[Option]:
    yield from sharded_alike(call)
    yield Option((SUM, *(REPLICATE,) * (len(call.tensors) - 1)), (SUM,))


@rule("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def rounded_div(call: OpCall) -> Iterator[Option]:
    yield from sharded_alike(call)


@rule("aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Tensor")
def add(call: OpCall) -> Iterator[Option]:
    yield from sharded_alike(call)
    if len(call.tensors) == 2 and all(_adds(node.meta["val"].dtype) for node in call.tensors):
        yield Option((SUM, SUM), (SUM,))


def _adds(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


@rule("aten.where.self", "aten.masked_fill.Tensor", "aten.copy")
def where(call: OpCall) -> Iterator[Option]:
    yield from sharded_alike(call)
