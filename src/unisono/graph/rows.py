"""Samples kept apart from tokens: some models put both into the rows of one matrix for a product, and take them apart
after it.

    (samples, tokens, width) -> (samples x tokens, width) -> product -> (samples, tokens, features)

A rank that has some tokens of every sample has no run of such rows. The same without the joined dim can be cut by
tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default)


def part_from_tokens(graph: fx.Graph) -> None:
    """Changes the graph."""
    for node in list(graph.nodes):
        x = _joined(node)
        if x is None:
            continue
        bias, rows, weight = node.args
        with graph.inserting_before(node):
            product = _called(node, aten.matmul.default, (x, weight))
            made = _called(node, aten.add.Tensor, (product, bias))
        for apart in list(node.users):
            apart.replace_all_uses_with(made)
            graph.erase_node(apart)
        graph.erase_node(node)
        if not rows.users:
            graph.erase_node(rows)


def _joined(node: fx.Node) -> fx.Node | None:
    """What has samples and tokens apart, where this is a product with both in its rows, for no other reason."""
    if node.target is not aten.addmm.default or len(node.args) != 3 or node.kwargs:
        return None
    rows: Any = node.args[1]
    if rows.target not in _VIEWS or not isinstance(rows.args[0], fx.Node):
        return None
    x = rows.args[0]
    shape = tuple(x.meta["val"].shape)
    apart = (*shape[:-1], node.meta["val"].shape[-1])
    is_joined = len(shape) > 2 and shape[-1] == rows.meta["val"].shape[-1]
    leave = [user.target in _VIEWS and tuple(user.meta["val"].shape) == apart for user in node.users]
    return x if is_joined and leave and all(leave) else None


def _called(like: fx.Node, target: Any, args: tuple[fx.Node, ...]) -> fx.Node:
    made = like.graph.call_function(target, args)
    made.meta = dict(like.meta)
    made.meta["val"] = next(iter(like.users)).meta["val"]
    return made
