"""What ranks under a plan say when a step's last backward is over, before the optimizer: once in a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import nn

from unisono.graph.lowering import Lowered, peer
from unisono.graph.talk import Talk
from unisono.mesh.mesh import Mesh
from unisono.parallel.bucket import gradient_dtype, is_summed, summed_axes
from unisono.parallel.layout import Axes
from unisono.train.held_model import held_parameters

_NORM = 8  # bytes of the sum of squares


def replica_sums(model: nn.Module, parts: Sequence[Lowered], rank: int) -> list[Talk]:
    """Of gradients, without ZeRO: a message has a number for each parameter too, by which none is told from zeros.
    What is too much for one message goes in several, which depends on the device, and is one here."""
    mesh = parts[0].mesh
    groups: dict[Axes, list[nn.Parameter]] = {}
    for parameter in held_parameters(model, parts, rank).values():
        if is_summed(parameter, mesh):
            groups.setdefault(summed_axes(parameter, mesh), []).append(parameter)
    made = []
    for axes, members in groups.items():
        count = len(members)
        elements = sum(parameter.numel() for parameter in members) + count
        size = sum(p.numel() * gradient_dtype(p).itemsize + gradient_dtype(p).itemsize for p in members)
        ranks = mesh.along(*axes, rank=rank)
        received = round(2 * size * (len(ranks) - 1) / len(ranks))
        words = f"sum, gradients of {count} parameter{'s' if count > 1 else ''}"
        made.append(Talk("all_reduce", axes, ranks, received, (elements,), (elements,), words, True))
    return made


def closing(parts: Sequence[Lowered], whole: Mesh, clip: float | None, rank: int) -> list[Talk]:
    """`parts`: the programs of the rank's stages; `whole`: the mesh of the plan."""
    return [*_tied(parts, rank), *_clipping(whole, clip)]


def _tied(parts: Sequence[Lowered], rank: int) -> Iterator[Talk]:
    """Parameters that other ranks of the pipeline use too; one that several stages here use is summed once."""
    seen: set[str] = set()
    for part in parts:
        for node, places in part.tied.items():
            if node in seen or node not in part.trace.tracked or part.whole is None:
                continue
            seen.add(node)
            shape = part.beside.kept.get(node, part.given[node].local(part.mesh, rank))
            ranks = tuple(sorted({rank, *(peer(part.whole, place, rank) for place in places)}))
            size = math.prod(shape) * part.given[node].dtype.itemsize
            received = round(2 * size * (len(ranks) - 1) / len(ranks))
            words = f"sum, gradient of {part.trace.parameters[node]}, which is tied"
            yield Talk("all_reduce", ("pp",), ranks, received, shape, shape, words, True)


def _clipping(whole: Mesh, clip: float | None) -> Iterator[Talk]:
    ranks = tuple(int(rank) for rank in whole.ranks.reshape(-1))
    if clip is None or len(ranks) == 1:
        return
    axes = tuple(name for name in whole.names if whole.size(name) > 1)
    received = round(2 * _NORM * (len(ranks) - 1) / len(ranks))
    yield Talk("all_reduce", axes, ranks, received, (), (), f"sum, norm of all gradients, to clip at {clip:g}", True)
