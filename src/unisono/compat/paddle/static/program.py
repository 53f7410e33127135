"""Program: functions recorded in order, run as often as wanted; and the two programs that static mode fills.

paddle.enable_static()
with paddle.static.program_guard(paddle.static.default_main_program()):
    img = paddle.static.data("img", [None, 256], "float32")
    loss = ...                                   # recorded
    optimizer.minimize(loss)
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten

from unisono.compat.language import say
from unisono.compat.paddle.static.variable import Variable, meta_call, metas_of, paired
from unisono.compat.paddle.tensor import dtype_of, plain
from unisono.errors import UsageError


@dataclass(frozen=True)
class Op:
    """A call of a function of torch."""

    type: str
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    outputs: Any  # a structure of variables and of what does not depend on values

    def __str__(self) -> str:
        made = ", ".join(f"{{{each!r}}}" for each in tree_leaves(self.outputs) if isinstance(each, Variable))
        return f"{made} = {self.type}({', '.join(map(_shown, tree_leaves((self.args, self.kwargs))))})"


def _shown(leaf: Any) -> str:
    if isinstance(leaf, Variable):
        return leaf.name
    return f"{type(leaf).__name__}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)


class Program:
    """Ops in order, the variables they are fed with, and perhaps an optimizer."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.variables: dict[str, Variable] = {}
        self.optimizer: Any = None
        self.loss: Variable | None = None
        self.on_backward: Callable[[Variable], None] | None = None  # of a program that a pipeline runs
        self._names: Counter[str] = Counter()

    @property
    def desc(self) -> Program:
        return self

    def global_block(self) -> Program:
        return self

    def list_vars(self) -> list[Variable]:
        return list(self.variables.values())

    def clone(self, for_test: bool = False) -> Program:
        """The same ops; for_test: without the backward and the optimizer."""
        twin = Program()
        twin.ops, twin.variables, twin._names = list(self.ops), dict(self.variables), Counter(self._names)
        if not for_test:
            twin.optimizer, twin.loss = self.optimizer, self.loss
        return twin

    def __str__(self) -> str:
        lines = [f"{{{each!r}}} = feed()" for each in self.variables.values() if each.is_data]
        lines += [str(op) for op in self.ops]
        if self.loss is not None:
            lines += [f"backward({self.loss.name})", f"{type(self.optimizer).__name__.lower()}()"]
        return "\n".join(lines)

    # ---- recording ---------------------------------------------------------------------------------------------------

    def data(self, name: str, metas: tuple[torch.Tensor, ...]) -> Variable:
        if name in self.variables:
            raise UsageError(
                say(
                    f"static.data({name!r}): the program has a variable of that name; Paddle would replace it, here "
                    "give "
                    "another name",
                    f"static.data({name!r})：程序中已有同名变量；飞桨会替换它，这里请换一个名字",
                )
            )
        made = self.variables[name] = Variable(self, name, metas, is_data=True)
        return made

    def record(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        kind = getattr(function, "__name__", type(function).__name__).strip("_")
        args, kwargs = plain((args, kwargs))
        leaves, spec = paired(meta_call(function, args, kwargs))
        outputs = tree_unflatten(
            [self._made(kind, each) if isinstance(each[0], torch.Tensor) else each[0] for each in leaves], spec
        )
        if any(isinstance(leaf[0], torch.Tensor) for leaf in leaves):
            self.ops.append(Op(kind, function, args, kwargs, outputs))
        return outputs

    def _made(self, kind: str, metas: tuple[torch.Tensor, ...]) -> Variable:
        name = f"{kind}_{self._names[kind]}.tmp_0"
        self._names[kind] += 1
        made = self.variables[name] = Variable(self, name, metas)
        return made

    def minimize(self, optimizer: Any, loss: Variable) -> None:
        if self.loss is not None:
            raise UsageError(
                say(
                    "minimize was called twice for one program: Paddle would train twice a run; make a program for "
                    "each",
                    "对同一个程序调用了两次 minimize：飞桨每次运行会训练两次；请为每个优化器建立各自的程序",
                )
            )
        optimizer.give(self.parameters())
        self.optimizer, self.loss = optimizer, loss

    def parameters(self) -> list[nn.Parameter]:
        """Those that the ops use and that are trained, in the order of their first use."""
        leaves = [leaf for op in self.ops for leaf in tree_leaves((op.args, op.kwargs))]
        for leaf in leaves:
            if isinstance(leaf, nn.Parameter) and "stop_gradient" in vars(leaf):
                leaf.requires_grad_(not leaf.stop_gradient)  # type: ignore[attr-defined]
        found = {id(leaf): leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and leaf.requires_grad}
        return list(found.values())

    def captured(self) -> list[torch.Tensor]:
        """Tensors with values that the ops use, but for parameters: of a loss, the labels."""
        leaves = [leaf for op in self.ops for leaf in tree_leaves((op.args, op.kwargs))]
        found = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.requires_grad}
        return list(found.values())

    # ---- running -----------------------------------------------------------------------------------------------------

    def run(self, fed: Mapping[Variable, torch.Tensor], instead: Mapping[int, torch.Tensor] | None = None) -> Values:
        """Run the ops. instead: for tensors that were recorded, by their id, those to use now."""
        values: dict[Variable, Any] = dict(fed)
        instead = instead or {}

        def value(leaf: Any) -> Any:
            return values[leaf] if isinstance(leaf, Variable) else instead.get(id(leaf), leaf)

        for op in self.ops:
            args, kwargs = tree_map(value, (op.args, op.kwargs))
            results = tree_leaves(op.function(*args, **kwargs))
            for variable, result in zip(tree_leaves(op.outputs), results, strict=True):
                if isinstance(variable, Variable):
                    values[variable] = result
        return values


Values = dict[Variable, Any]


# ---- static mode -----------------------------------------------------------------------------------------------------


@dataclass
class _Mode:
    is_static: bool = False
    main: Program = None  # type: ignore[assignment]
    startup: Program = None  # type: ignore[assignment]


_mode = _Mode(False, Program(), Program())


def enable_static() -> None:
    _mode.is_static = True


def disable_static(place: Any = None) -> None:
    _mode.is_static = False


def in_dynamic_mode() -> bool:
    return not _mode.is_static


def default_main_program() -> Program:
    return _mode.main


def default_startup_program() -> Program:
    """Empty: layers draw their parameters when they are made."""
    return _mode.startup


@contextlib.contextmanager
def program_guard(main_program: Program, startup_program: Program | None = None) -> Iterator[None]:
    before = _mode.main, _mode.startup
    _mode.main, _mode.startup = main_program, startup_program or _mode.startup
    try:
        yield
    finally:
        _mode.main, _mode.startup = before


def data(name: str, shape: Sequence[int | None], dtype: Any = None, lod_level: int = 0) -> Variable:
    """What a program is fed with, by name. None and -1 are dims that may differ from run to run."""
    if not _mode.is_static:
        raise UsageError(
            say(
                f"static.data({name!r}) without static mode: as in Paddle, call paddle.enable_static() first",
                f"未开启静态图模式就调用 static.data({name!r})：与飞桨相同，请先调用 paddle.enable_static()",
            )
        )
    return _mode.main.data(name, metas_of(shape, torch.get_default_dtype() if dtype is None else dtype_of(dtype)))


class InputSpec:
    """The shape, the dtype and the name of an input."""

    def __init__(self, shape: Sequence[int | None], dtype: Any = "float32", name: str | None = None) -> None:
        self.shape, self.dtype, self.name = list(shape), dtype_of(dtype), name

    def __repr__(self) -> str:
        return f"InputSpec(shape={self.shape}, dtype={str(self.dtype).removeprefix('torch.')}, name={self.name})"


def recorded(
    model: Callable[..., Any],
    loss: Callable[..., Any],
    optimizer: Any,
    inputs: list[InputSpec],
    labels: list[InputSpec],
) -> Program:
    """The program of one device that trains a model on data of these specs."""
    program = Program()
    given = [
        [program.data(spec.name or f"{kind}_{n}", metas_of(spec.shape, spec.dtype)) for n, spec in enumerate(specs)]
        for kind, specs in (("input", inputs), ("label", labels))
    ]
    program.minimize(optimizer, loss(model(*given[0]), *given[1]))
    return program
