"""paddle.base.core: Graph, of a program's desc."""

from __future__ import annotations

from typing import Any

from unisono.compat.paddle.paddle_names import missing_names


class Graph:
    def __init__(self, desc: Any) -> None:
        self.desc = desc


__getattr__ = missing_names(__name__)
