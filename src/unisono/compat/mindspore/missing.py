"""Names of MindSpore that are not here: one sentence, with the nearest name that is."""

from __future__ import annotations

import difflib
import dis
import sys
from collections.abc import Callable
from typing import Any

from unisono.compat.language import say
from unisono.errors import UsageError


class MissingName(UsageError, AttributeError):
    """A name that MindSpore may have, and this package has not."""


class MissingImport(UsageError, ImportError):
    """The same, in `from mindspore.nn import name`."""


def missing_in(module: str) -> Callable[[str], Any]:
    """What a module answers when it is asked for a name that it has not."""

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        frame = sys._getframe(1)
        importing = dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"
        raise (MissingImport if importing else MissingName)(sentence(module, name))

    return __getattr__


def sentence(module: str, name: str) -> str:
    known = [each for each in vars(sys.modules[module]) if not each.startswith("_")]
    close = difflib.get_close_matches(name, known, 1, cutoff=0.75)
    shown = module.removeprefix("unisono.compat.")
    hint, zh_hint = (f"did you mean {close[0]}? ", f"您要找的是 {close[0]} 吗？") if close else ("", "")
    return say(
        f"{shown}.{name} is not one of the names that unisono has of MindSpore; {hint}docs/mindspore.md lists them, "
        "and torch's own modules and functions may be used in a Cell instead",
        f"unisono 没有 MindSpore 的 {shown}.{name}；{zh_hint}docs/zh/mindspore.md 列出了已有的名字，Cell 中也可以"
        "直接使用 torch 的模块和函数",
    )
