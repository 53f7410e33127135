"""Primitive: an op as an object, `ops.MatMul().shard(((2, 4), (4, 1)))`.

A primitive is a module without parameters, so that the ops it traces to carry its name. `shard` is `uni.shard`: in the
modes semi_auto_parallel and auto_parallel the strategy is a mark of the trace, and otherwise nothing.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import nn

from unisono.compat.language import say
from unisono.compat.mindspore import context
from unisono.errors import UsageError
from unisono.graph.capture.source import calling_line
from unisono.graph.marks.recorder import recorder
from unisono.graph.marks.sharded import Sharded, shard
from unisono.graph.marks.spec import PlacementSpec

Strategy = tuple[tuple[int, ...], ...]
Specs = tuple[PlacementSpec | None, ...]


_checked: list[Primitive] | None = None  # where a net runs on shapes alone: the ops with strategies that were called


@contextlib.contextmanager
def checked_strategies() -> Iterator[list[Primitive]]:
    """In the block, tensors that a strategy does not divide are refused, as they are in a trace. The ops with
    strategies that were called, in order."""
    global _checked
    _checked = []
    try:
        yield _checked
    finally:
        _checked = None


def _counts() -> bool:
    """Whether strategies count for the call that is going on: they do in a trace for training. An op that is called
    otherwise (Model.eval, or a Cell by itself) computes on full tensors."""
    recording = recorder()
    return _checked is not None or (recording is not None and recording.binding)


class ShapeError(UsageError):
    """Tensors that an op cannot take. `expected` says, in the user's language, what it takes as its input of that
    number."""

    def __init__(self, op: Primitive, shapes: Sequence[tuple[int, ...]], number: int, expected: str) -> None:
        self.op, self.shapes, self.number, self.expected = op, list(shapes), number, expected
        shape = self.shapes[number]
        super().__init__(
            say(
                f"{op.shown} takes {expected}, but its input {number} has shape {shape}",
                f"{op.shown} 接受{expected}，而输入 {number} 的形状为 {shape}",
            )
        )


class Primitive(nn.Module, abc.ABC):
    """A subclass has `compute`, on torch's tensors."""

    instance_name = ""  # the attribute of the Cell that has it
    called_at = ""  # the last line that called it: what torch notes of a trace leaves out frames of `construct`

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name or type(self).__name__
        self.in_strategy: Strategy | None = None
        self.line = ""
        self._specs: tuple[Specs, Specs] = ((), ())  # of the marks of inputs and outputs

    @abc.abstractmethod
    def compute(self, *args: Any, **kwargs: Any) -> Any: ...

    def check(self, *args: Any) -> None:
        """Raise ShapeError where the op cannot take these tensors."""

    def shard(self, in_strategy: Any = None, out_strategy: Any = None) -> Self:
        """The op, marked: the number of shards along each dim of each input."""
        if in_strategy is None:
            raise UsageError(
                say(
                    f"{self.name}().shard(None): MindSpore takes an op without a strategy as one to search "
                    "for; leave out .shard, or give numbers of shards such as ((2, 4), (4, 1))",
                    f"{self.name}().shard(None)：MindSpore 把没有策略的算子作为待搜索的；请去掉 .shard，或给出"
                    "切分数，如 ((2, 4), (4, 1))",
                )
            )
        marked = shard(self.compute, in_strategy, out_strategy)
        marked.called = True  # the marks are made anew in every call, as on one rank they count for nothing
        self._specs = marked.inputs, marked.outputs
        self.in_strategy = tuple(tuple(each) for each in in_strategy)
        self.line = calling_line()
        return self

    @property
    def shown(self) -> str:
        """MatMul (matmul)"""
        return f"{self.name} ({self.instance_name})" if self.instance_name else self.name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["called_at"] = calling_line()
        self.check(*args)
        if self.in_strategy is None or not context.has_strategies() or not _counts():
            return self.compute(*args, **kwargs)
        self._require_divisible([arg for arg in args if isinstance(arg, torch.Tensor)])
        if _checked is not None:
            _checked.append(self)
        return Sharded(self.compute, *self._specs)(*args, **kwargs)

    def _require_divisible(self, tensors: Sequence[torch.Tensor]) -> None:
        assert self.in_strategy is not None
        where = f"{self.shown}.shard({self.in_strategy}) at {self.line}"
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len(shapes) != len(self.in_strategy):
            raise UsageError(
                say(
                    f"{where} has strategies of {len(self.in_strategy)} inputs, but the op was called with "
                    f"{len(shapes)}; MindSpore refuses it too: give one an input",
                    f"{where} 有 {len(self.in_strategy)} 个输入的策略，而算子调用时有 {len(shapes)} 个输入；"
                    "MindSpore 同样会报错：请为每个输入各给一个",
                )
            )
        for number, (counts, shape) in enumerate(zip(self.in_strategy, shapes, strict=True)):
            if len(counts) != len(shape):
                raise UsageError(
                    say(
                        f"{where}: input {number} has shape {shape}, and the strategy {counts} has "
                        f"{len(counts)} numbers; MindSpore refuses it too: give one a dim",
                        f"{where}：输入 {number} 的形状为 {shape}，而策略 {counts} 有 {len(counts)} 个数；"
                        "MindSpore 同样会报错：请为每一维各给一个",
                    )
                )
            for dim, (count, size) in enumerate(zip(counts, shape, strict=True)):
                if size % count:
                    divisors = ", ".join(map(str, _divisors(size)))
                    raise UsageError(
                        say(
                            f"{where}: dim {dim} of input {number}, of shape {shape}, cannot be cut into {count} even "
                            "shards; MindSpore refuses it when it compiles the net: use a divisor of "
                            f"{size} ({divisors})",
                            f"{where}：输入 {number} 的形状为 {shape}，第 {dim} 维不能均分为 {count} 份；"
                            f"MindSpore 编译网络时同样会报错：请使用 {size} 的因数（{divisors}）",
                        )
                    )


def _divisors(size: int) -> list[int]:
    small = [number for number in range(1, math.isqrt(size) + 1) if size % number == 0]
    return sorted({*small, *(size // number for number in small)})
