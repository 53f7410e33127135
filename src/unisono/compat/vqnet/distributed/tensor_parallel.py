"""Linear layers shared by ranks, with VQNet's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.compat.language import say
from unisono.compat.vqnet.distributed.joining import communicator_of
from unisono.compat.vqnet.dtype import Dtype, dtype_of
from unisono.compat.vqnet.nn.initial import Initializer, fill
from unisono.compat.vqnet.nn.module import Module
from unisono.compat.vqnet.whole import whole_number
from unisono.errors import UsageError
from unisono.parallel.tensor import linear


class ColumnParallelLinear(Module, linear.ColumnParallelLinear):
    """Y = X A + b of which each rank has some columns of A: X is full on all ranks, Y is this rank's shard.

    A starts normal with deviation 1/sqrt(input_size), b as zeros, unless initializers fill them: they are given the
    full shapes, (input_size, output_size) and (output_size,). Ranks take shards of what rank 0 has drawn.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        weight_initializer: Initializer | None = None,
        bias_initializer: Initializer | None = None,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        name: str = "",
        tp_comm: Any = None,
    ) -> None:
        _require_sizes("ColumnParallelLinear", input_size, output_size)
        options = _options(weight_initializer, bias_initializer, use_bias, dtype, tp_comm)
        linear.ColumnParallelLinear.__init__(self, input_size, output_size, **options)
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_require_matrix(self, x))


class RowParallelLinear(Module, linear.RowParallelLinear):
    """Y = X A + b of which each rank has some rows of A: Y is full on all ranks.

    X is this rank's shard, as ColumnParallelLinear gives it, or full: its width decides. Otherwise as there.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        weight_initializer: Initializer | None = None,
        bias_initializer: Initializer | None = None,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        name: str = "",
        tp_comm: Any = None,
    ) -> None:
        _require_sizes("RowParallelLinear", input_size, output_size)
        options = _options(weight_initializer, bias_initializer, use_bias, dtype, tp_comm)
        linear.RowParallelLinear.__init__(self, input_size, output_size, **options)
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.input_is_parallel = _require_matrix(self, x).shape[-1] != self.in_features
        return super().forward(x)


def _require_matrix(layer: torch.nn.Module, x: Any) -> torch.Tensor:
    name = type(layer).__name__
    if not isinstance(x, torch.Tensor):
        raise UsageError(
            say(
                f"{name} takes a tensor, not a {type(x).__name__}; make one with tensor.to_tensor",
                f"{name} 接受张量，而不是 {type(x).__name__}；请用 tensor.to_tensor 建立",
            )
        )
    if not x.dim():
        raise UsageError(
            say(
                f"{name} takes a tensor (samples, features), not a single number",
                f"{name} 接受张量（样本、特征），而不是单个数",
            )
        )
    if not (x.is_floating_point() or x.is_complex()):
        raise UsageError(
            say(
                f"{name} takes real or complex numbers, not {x.dtype}; convert it with astype(kfloat32)",
                f"{name} 接受实数或复数，而不是 {x.dtype}；请用 astype(kfloat32) 转换",
            )
        )
    return x


def _require_sizes(name: str, *sizes: Any) -> None:
    for size in sizes:
        if (whole_number(size) or 0) < 1:
            raise UsageError(
                say(
                    f"{name}: size {size!r}; expected input_size and output_size, whole numbers of at least 1",
                    f"{name}：大小 {size!r}；input_size 和 output_size 应为不小于 1 的整数",
                )
            )


def _options(
    weight_initializer: Initializer | None,
    bias_initializer: Initializer | None,
    use_bias: bool,
    dtype: Dtype | None,
    tp_comm: Any,
) -> dict[str, Any]:
    """VQNet's words in unisono's."""
    for name, given in (("weight_initializer", weight_initializer), ("bias_initializer", bias_initializer)):
        if given is not None and not callable(given):
            raise UsageError(
                say(
                    f"{name}={given!r}; expected a function that makes a tensor of a shape, or None",
                    f"{name}={given!r}；应为按形状建立张量的函数，或 None",
                )
            )
    if dtype is not None and not (dtype_of(dtype).is_floating_point or dtype_of(dtype).is_complex):
        raise UsageError(
            say(
                f"dtype={dtype!r} is {dtype_of(dtype)}; weights are trained, so expected floats or complex",
                f"dtype={dtype!r} 是 {dtype_of(dtype)}；权重要训练，应为浮点数或复数",
            )
        )
    comm = communicator_of(tp_comm)
    return {
        "bias": use_bias,
        "init": _weight(weight_initializer, comm),
        "bias_init": _bias(bias_initializer, comm),
        "comm": comm,
        "dtype": None if dtype is None else dtype_of(dtype),
    }


def _weight(initializer: Initializer | None, comm: Communicator) -> Callable[[torch.Tensor], None]:
    def init(weight: torch.Tensor) -> None:
        if initializer is None:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        else:
            fill(weight, initializer, transposed=True)
        comm.broadcast(weight.data)

    return init


def _bias(initializer: Initializer | None, comm: Communicator) -> Callable[[torch.Tensor], None]:
    def init(bias: torch.Tensor) -> None:
        fill(bias, torch.nn.init.zeros_ if initializer is None else initializer)
        comm.broadcast(bias.data)

    return init
