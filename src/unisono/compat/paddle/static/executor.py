"""Executor: runs a program with what it is fed, and returns what is fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from unisono.compat.language import say
from unisono.compat.paddle.static.program import Program, default_main_program, default_startup_program
from unisono.compat.paddle.static.variable import Variable
from unisono.compat.paddle.tensor import plain, wrapped
from unisono.errors import UsageError


class Executor:
    """place is taken and not needed: a rank has one device."""

    def __init__(self, place: Any = None) -> None:
        self.place = place

    def run(
        self,
        program: Program | None = None,
        feed: Mapping[str, Any] | None = None,
        fetch_list: Sequence[Any] | None = None,
        return_numpy: bool = True,
    ) -> list[Any]:
        """A run of a program: forward and, where `minimize` was called, backward and an update of the parameters.

        Returns the fetched values, as arrays; those of before the update.
        """
        program = default_main_program() if program is None else program
        if not isinstance(program, Program):
            raise UsageError(
                say(
                    f"Executor.run({type(program).__name__}): Paddle runs a Program; give one of paddle.static, or "
                    "call "
                    "run(feed=..., fetch_list=...) for the default one",
                    f"Executor.run({type(program).__name__})：飞桨运行的是 Program；请给出 paddle.static 的程序，"
                    "或用 run(feed=..., fetch_list=...) 运行默认程序",
                )
            )
        if program is default_startup_program():
            return []
        if not program.ops:
            raise UsageError(
                say(
                    "Executor.run: the program is empty, and Paddle would find nothing to fetch; record one first: "
                    "paddle.enable_static(), then paddle.static.data and the model under program_guard",
                    "Executor.run：程序为空，飞桨也取不到任何结果；请先用 paddle.enable_static()，再在 program_guard 下"
                    "调用 paddle.static.data 和模型来建立程序",
                )
            )
        fetched = [_variable(program, each) for each in fetch_list or ()]
        trains = program.loss is not None
        with torch.set_grad_enabled(trains):
            values = program.run(_fed(program, feed or {}))
            found = [values[each].detach().clone() for each in fetched]
            if trains:
                assert program.loss is not None
                values[program.loss].backward()
                program.optimizer.step()
                program.optimizer.clear_grad()
        return [plain(each).cpu().numpy() if return_numpy else wrapped(each) for each in found]

    def close(self) -> None:
        """Nothing is kept between runs."""


def _variable(program: Program, given: Any) -> Variable:
    if isinstance(given, Variable):
        return given
    if given not in program.variables:
        listed = ", ".join(list(program.variables)[-5:])
        raise UsageError(
            say(
                f"fetch_list has {given!r}, which the program does not compute (Paddle would not find it either); give "
                f"variables or their names, such as {listed}",
                f"fetch_list 中的 {given!r} 不是程序计算的变量（飞桨同样找不到）；请给出变量或其名字，例如 {listed}",
            )
        )
    return program.variables[given]


def _fed(program: Program, feed: Mapping[str, Any]) -> dict[Variable, torch.Tensor]:
    wanted = {name: each for name, each in program.variables.items() if each.is_data}
    if feed.keys() != wanted.keys():
        raise UsageError(
            say(
                f"feed has {sorted(feed)}, but the program reads {sorted(wanted)}; as in Paddle, feed one value for "
                "each",
                f"feed 中有 {sorted(feed)}，而程序需要 {sorted(wanted)}；与飞桨相同，请逐一给出",
            )
        )
    values = {}
    for name, given in feed.items():
        variable = wanted[name]
        value = plain(given) if isinstance(given, torch.Tensor) else torch.as_tensor(np.asarray(given))
        sizes = zip(variable.shape, value.shape, strict=False)
        if value.dim() != variable.dim() or any(-1 != size != found for size, found in sizes):
            raise UsageError(
                say(
                    f"feed {name!r} is of shape {list(value.shape)}, but static.data has {variable.shape}; Paddle "
                    "would "
                    "refuse it too: feed that shape, or give None for dims that differ",
                    f"feed 的 {name!r} 形状为 {list(value.shape)}，而 static.data 声明为 {variable.shape}；"
                    "飞桨同样会拒绝："
                    "请使用该形状，或把可变的维度写成 None",
                )
            )
        values[variable] = value.to(variable.dtype)
    return values
