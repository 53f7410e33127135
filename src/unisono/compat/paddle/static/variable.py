"""Variable: a tensor of a program that is recorded and not run yet.

Every function of torch that is given one records itself in the variable's program and returns variables. Their shapes
are those that the function gives for two batch sizes; a dim that differs is unknown, and shown as -1, as in Paddle.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from unisono.compat.language import say
from unisono.compat.paddle.methods import MEANINGS
from unisono.errors import UsageError

if TYPE_CHECKING:
    from unisono.compat.paddle.static.program import Program

PROBES = (3, 5)  # batch sizes that shapes are tried with
_OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "matmul", "rmatmul", "floordiv",
    "mod", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "neg", "abs", "invert",
)  # fmt: skip


class Variable:
    """A tensor of a program, by name. `value` is there once the program has run, where the program keeps it."""

    def __init__(self, program: Program, name: str, metas: tuple[torch.Tensor, ...], is_data: bool = False) -> None:
        self.program = program
        self.name = name
        self.metas = metas  # without values, one for each of PROBES
        self.is_data = is_data
        self.stop_gradient = False
        self.value: torch.Tensor | None = None

    @property
    def shape(self) -> list[int]:
        sizes = zip(*(meta.shape for meta in self.metas), strict=True)
        return [size[0] if len(set(size)) == 1 else -1 for size in sizes]

    @property
    def dtype(self) -> torch.dtype:
        return self.metas[0].dtype

    @property
    def ndim(self) -> int:
        return self.metas[0].dim()

    def dim(self) -> int:
        return self.metas[0].dim()

    def __repr__(self) -> str:
        return f"{self.name} : {str(self.dtype).removeprefix('torch.')}{self.shape}"

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        program = next(leaf.program for leaf in tree_leaves(given) if isinstance(leaf, Variable))
        return program.record(func, *given)

    def __getattr__(self, name: str) -> Any:
        """The methods of a tensor, recorded."""
        own = MEANINGS.get(name) or getattr(torch.Tensor, name, None)
        if name.startswith("__") or not callable(own):
            raise AttributeError(
                say(
                    f"a variable of a static program has no {name!r}; its values come with Executor.run",
                    f"静态图程序的变量没有 {name!r}；它的值由 Executor.run 给出",
                )
            )
        return lambda *args, **kwargs: self.program.record(own, (self, *args), kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self.program.record(operator.getitem, (self, index), {})

    # ---- values ----------------------------------------------------------------------------------------------------

    def backward(self, *args: Any) -> None:
        if self.program.on_backward is None:
            raise UsageError(
                say(
                    f"{self.name}.backward() in static mode: as in Paddle, optimizer.minimize(loss) makes the "
                    "backward a "
                    "part of the program",
                    f"静态图模式下的 {self.name}.backward()：与飞桨相同，请用 optimizer.minimize(loss) "
                    "把反向计算加入程序",
                )
            )
        self.program.on_backward(self)

    def item(self) -> float:
        if self.value is None:
            raise UsageError(
                say(
                    f"{self.name} has no value yet: it is part of a program; read it from "
                    "Executor.run(fetch_list=...), "
                    "or, of a pipeline's loss, after backward()",
                    f"{self.name} 还没有值：它是程序的一部分；请用 Executor.run(fetch_list=...) 读取，"
                    "流水线的 loss 请在 backward() 之后读取",
                )
            )
        return float(self.value.item())

    def __float__(self) -> float:
        return self.item()

    def __bool__(self) -> bool:
        return bool(self.item())

    def numpy(self) -> np.ndarray:
        return np.asarray(self.item(), dtype=np.float32 if self.dtype == torch.float32 else None)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)


def _operator(name: str) -> Callable[..., Any]:
    own = getattr(torch.Tensor, name)
    return lambda self, *args: self.program.record(own, (self, *args), {})


for _name in _OPERATORS:
    setattr(Variable, f"__{_name}__", _operator(f"__{_name}__"))


def metas_of(shape: Sequence[int | None], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Tensors without values, of a shape in which None and -1 are unknown."""
    return tuple(
        torch.empty([probe if size in (None, -1) else int(size or 0) for size in shape], dtype=dtype, device="meta")
        for probe in PROBES
    )


def meta_call(func: Callable[..., Any], args: Any, kwargs: Any) -> list[Any]:
    """What a function returns for each of PROBES, without values."""

    def at(number: int) -> Any:
        def meta(leaf: Any) -> Any:
            if isinstance(leaf, Variable):
                return leaf.metas[number]
            return leaf.detach().to("meta") if isinstance(leaf, torch.Tensor) else leaf

        with torch.no_grad():
            given = tree_map(meta, (args, kwargs))
            return func(*given[0], **given[1])

    return [at(number) for number in range(len(PROBES))]


def paired(results: list[Any]) -> tuple[list[tuple[Any, ...]], Any]:
    """The leaves of several results of one structure, side by side, and that structure."""
    flat = [tree_flatten(each) for each in results]
    return list(zip(*(leaves for leaves, _ in flat), strict=True)), flat[0][1]
