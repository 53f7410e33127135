"""paddle.base.framework: IrGraph, which draws a program."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.utils._pytree import tree_leaves

from unisono.compat.paddle.base.core import Graph
from unisono.compat.paddle.paddle_names import missing_names
from unisono.compat.paddle.static.program import Op, Program
from unisono.compat.paddle.static.variable import Variable


class IrGraph:
    """A program's ops and variables. for_test is taken and changes nothing: all ops are drawn."""

    def __init__(self, graph: Graph, for_test: bool = False) -> None:
        self.graph = graph

    def draw(self, save_path: str, name: str, marked_nodes: Any = None, remove_ctr_var: bool = True) -> str:
        """Write name.dot, which Graphviz draws (dot -Tpdf); its path."""
        desc = self.graph.desc
        path = Path(save_path) / f"{name}.dot"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_dot(desc.ops) if isinstance(desc, Program) else _dot_of_lines(str(desc)))
        return str(path)


def _dot(ops: Iterable[Op]) -> str:
    lines = ["digraph program {", "  node [shape=box];"]
    for number, op in enumerate(ops):
        lines.append(f'  op{number} [label="{op.type}", style=filled];')
        for leaf in tree_leaves((op.args, op.kwargs)):
            if isinstance(leaf, Variable):
                lines.append(f'  "{leaf.name}" -> op{number};')
        for leaf in tree_leaves(op.outputs):
            if isinstance(leaf, Variable):
                lines.append(f'  "{leaf.name}" [label="{leaf!r}", shape=oval];')
                lines.append(f'  op{number} -> "{leaf.name}";')
    return "\n".join([*lines, "}", ""])


def _dot_of_lines(text: str) -> str:
    """A program of ranks: its lines, one after the other."""
    shown = [line.replace("\\", "\\\\").replace('"', '\\"') for line in text.splitlines()]
    nodes = [f'  op{number} [label="{line}"];' for number, line in enumerate(shown)]
    edges = [f"  op{number} -> op{number + 1};" for number in range(len(shown) - 1)]
    return "\n".join(["digraph program {", "  node [shape=box];", *nodes, *edges, "}", ""])


__getattr__ = missing_names(__name__)
