"""Names of MindSpore's that are not here: the nearest name that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unisono.compat.language import say
from unisono.compat.missing import answer_with, nearest


def missing_names(module: str) -> Callable[[str], Any]:
    """A module's __getattr__."""
    return answer_with(lambda name, known: sentence(module, name, known), module)


def sentence(module: str, name: str, known: Mapping[str, Any]) -> str:
    near = nearest(name, known, cutoff=0.75)
    shown = module.removeprefix("unisono.compat.")
    hint, zh_hint = (f"did you mean {near}? ", f"您要找的是 {near} 吗？") if near else ("", "")
    return say(
        f"{shown}.{name} is not one of the names that unisono has of MindSpore; {hint}docs/mindspore.md lists them, "
        "and torch's own modules and functions may be used in a Cell instead",
        f"unisono 没有 MindSpore 的 {shown}.{name}；{zh_hint}docs/zh/mindspore.md 列出了已有的名字，Cell 中也可以"
        "直接使用 torch 的模块和函数",
    )
