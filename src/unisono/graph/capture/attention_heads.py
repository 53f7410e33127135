"""Heads kept apart from samples: nn.MultiheadAttention joins both in one dim, and takes them apart two ops later.

    (length, samples, width) -> (length, samples x heads, head) -> transposed -> (samples, heads, length, head)

No rank's heads are adjacent in the joined dim, so it cannot be sharded by heads. The same without it can:

    (length, samples, width) -> (length, samples, heads, head) -> permuted
"""

from __future__ import annotations

import torch
from torch import fx

from unisono.graph.capture.unfuse import called

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default)


def part_from_samples(graph: fx.Graph) -> None:
    """Changes the graph."""
    for node in list(graph.nodes):
        joined = _joined(node)
        if joined is None:
            continue
        x = joined.args[0]
        samples, heads, length, head = node.meta["val"].shape
        with graph.inserting_before(node):
            apart = called(joined, aten.reshape.default, (x, [length, samples, heads, head]))
            made = called(node, aten.permute.default, (apart, [1, 2, 0, 3]))
        node.replace_all_uses_with(made)
        for gone in (node, node.args[0], joined):
            graph.erase_node(gone)


def _joined(node: fx.Node) -> fx.Node | None:
    """The view that joins samples and heads, where this is the view that takes them apart."""
    if node.target not in _VIEWS or node.meta["val"].dim() != 4:
        return None
    swap = node.args[0]
    if not isinstance(swap, fx.Node) or swap.target is not aten.transpose.int or len(swap.users) != 1:
        return None
    joined = swap.args[0]
    if sorted(int(dim) % 3 for dim in swap.args[1:]) != [0, 1] or not isinstance(joined, fx.Node):  # type: ignore[arg-type]
        return None
    if joined.target not in _VIEWS or len(joined.users) != 1 or not isinstance(joined.args[0], fx.Node):
        return None
    before, between = (tuple(each.meta["val"].shape) for each in (joined.args[0], joined))
    samples, heads, length, head = node.meta["val"].shape
    fits = before == (length, samples, heads * head) and between == (length, samples * heads, head)
    return joined if fits else None
