"""The primitives that MindSpore's programs reach for, each torch's function behind MindSpore's arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from unisono.compat.language import say
from unisono.compat.mindspore.mindspore_names import missing_names
from unisono.compat.mindspore.ops.primitive import Primitive, ShapeError

__all__ = [
    "Abs",
    "Add",
    "BatchMatMul",
    "BiasAdd",
    "Cast",
    "Concat",
    "Div",
    "Exp",
    "ExpandDims",
    "Gather",
    "GeLU",
    "Log",
    "LogSoftmax",
    "MatMul",
    "Maximum",
    "Minimum",
    "Mul",
    "Neg",
    "Pow",
    "ReLU",
    "RealDiv",
    "ReduceMax",
    "ReduceMean",
    "ReduceSum",
    "Reshape",
    "Sigmoid",
    "Softmax",
    "Sqrt",
    "Square",
    "Squeeze",
    "Sub",
    "Tanh",
    "Transpose",
]
__getattr__ = missing_names(__name__)

Axis = int | Sequence[int]


class MatMul(Primitive):
    """The product of two matrices, each transposed first if asked."""

    dims: int | None = 2

    def __init__(self, transpose_a: bool = False, transpose_b: bool = False) -> None:
        super().__init__()
        self.transpose_a, self.transpose_b = transpose_a, transpose_b

    def check(self, *args: Any) -> None:
        shapes = [tuple(arg.shape) for arg in args]
        for number, shape in enumerate(shapes):
            if len(shape) < 2 or (self.dims is not None and len(shape) != self.dims):
                dims = say(f"tensors of {self.dims or '2 or more'} dims", f" {self.dims or '2 或更多'} 维的张量")
                raise ShapeError(self, shapes, number, dims)
        columns = shapes[0][-2 if self.transpose_a else -1]
        rows = shapes[1][-1 if self.transpose_b else -2]
        if columns != rows:
            which, zh = ("rows", "行") if self.transpose_a else ("columns", "列")
            expected = say(
                f"an input of {rows} {which}, as its input 1 has shape {shapes[1]}",
                f" {rows} {zh}的输入（因为输入 1 的形状为 {shapes[1]}）",
            )
            raise ShapeError(self, shapes, 0, expected)

    def compute(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.transpose(-2, -1) if self.transpose_a else x
        y = y.transpose(-2, -1) if self.transpose_b else y
        return torch.matmul(x, y)


class BatchMatMul(MatMul):
    """Products of matrices in the last two dims."""

    dims = None


class _Function(Primitive):
    """An op that is a function of tensors."""

    function: Callable[..., torch.Tensor]

    def compute(self, *args: Any) -> torch.Tensor:
        return type(self).function(*args)


class ReLU(_Function):
    function = torch.relu


class Sigmoid(_Function):
    function = torch.sigmoid


class Tanh(_Function):
    function = torch.tanh


class Exp(_Function):
    function = torch.exp


class Log(_Function):
    function = torch.log


class Sqrt(_Function):
    function = torch.sqrt


class Square(_Function):
    function = torch.square


class Neg(_Function):
    function = torch.neg


class Abs(_Function):
    function = torch.abs


class Add(_Function):
    function = torch.add


class Sub(_Function):
    function = torch.sub


class Mul(_Function):
    function = torch.mul


class Div(_Function):
    function = torch.div


class RealDiv(_Function):
    function = torch.div


class Pow(_Function):
    function = torch.pow


class Maximum(_Function):
    function = torch.maximum


class Minimum(_Function):
    function = torch.minimum


class BiasAdd(_Function):
    function = torch.add


class GeLU(Primitive):
    """By tanh, as MindSpore's primitive."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")


class Softmax(Primitive):
    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        self.axis = axis

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, self.axis)


class LogSoftmax(Softmax):
    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(x, self.axis)


class _Reduction(Primitive):
    def __init__(self, keep_dims: bool = False) -> None:
        super().__init__()
        self.keep_dims = keep_dims

    def _axes(self, x: torch.Tensor, axis: Axis) -> tuple[int, ...]:
        """No axes are all of them."""
        axes = (axis,) if isinstance(axis, int) else tuple(axis)
        return axes or tuple(range(x.dim()))


class ReduceSum(_Reduction):
    def compute(self, x: torch.Tensor, axis: Axis = ()) -> torch.Tensor:
        return x.sum(self._axes(x, axis), keepdim=self.keep_dims)


class ReduceMean(_Reduction):
    def compute(self, x: torch.Tensor, axis: Axis = ()) -> torch.Tensor:
        return x.mean(self._axes(x, axis), keepdim=self.keep_dims)


class ReduceMax(_Reduction):
    def compute(self, x: torch.Tensor, axis: Axis = ()) -> torch.Tensor:
        return x.amax(self._axes(x, axis), keepdim=self.keep_dims)


class Reshape(Primitive):
    def compute(self, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return x.reshape(tuple(shape))


class Transpose(Primitive):
    def compute(self, x: torch.Tensor, perm: Sequence[int]) -> torch.Tensor:
        return x.permute(tuple(perm))


class ExpandDims(Primitive):
    def compute(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.unsqueeze(axis)


class Squeeze(Primitive):
    def __init__(self, axis: Axis = ()) -> None:
        super().__init__()
        self.axis = (axis,) if isinstance(axis, int) else tuple(axis)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(self.axis) if self.axis else x.squeeze()


class Cast(Primitive):
    def compute(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.to(dtype)


class Concat(Primitive):
    def __init__(self, axis: int = 0) -> None:
        super().__init__()
        self.axis = axis

    def compute(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(tuple(tensors), self.axis)


class Gather(Primitive):
    """Slices of `x` at these indices of a dim; of rows, an embedding."""

    def compute(self, x: torch.Tensor, indices: torch.Tensor, axis: int) -> torch.Tensor:
        if axis == 0 and x.dim() == 2:
            return F.embedding(indices, x)
        found = x.index_select(axis, indices.reshape(-1))
        return found.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis % x.dim() + 1 :])
