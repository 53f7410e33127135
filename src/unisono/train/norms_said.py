"""What ranks that have other samples each say for a BatchNorm: it takes the statistics of all of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from unisono.graph.assignment import producers
from unisono.graph.beside import Inside
from unisono.graph.lowering import Compute, Lowered
from unisono.graph.rules.call import Call
from unisono.graph.rules.registry import target_name
from unisono.graph.talk import Talk
from unisono.graph.trace import Trace
from unisono.mesh.placement import shard_dim
from unisono.plan.plan import DATA

_STATISTICS = ("aten.mean.dim", "aten.var.correction")


def is_of_batch(node: fx.Node) -> bool:
    """Whether it is a BatchNorm that looks at the batch."""
    return target_name(node.target).startswith("aten.batch_norm") and bool(Call(node)["training"])


def is_known_to_norm(trace: Trace, node: fx.Node) -> bool:
    """Whether it is a statistic of what a BatchNorm is given, for its running averages: the norm has found it."""
    if target_name(node.target) not in _STATISTICS:
        return False
    detached = trace.node(producers(node)[0][0])
    if target_name(detached.target) != "aten.detach.default":
        return False
    return any(is_of_batch(user) for user in trace.node(producers(detached)[0][0]).users if user.op == "call_function")


def show_norms(parts: Sequence[Lowered], rank: int) -> None:
    """Write into the programs of a rank's stages what is said in their BatchNorms."""
    for part in parts:
        for compute in part.computes:
            axes = _sharing(compute, part) if is_of_batch(compute.node) else ()
            if axes:
                part.beside.inside[compute.name] = _said(compute, part, axes, rank)


def _sharing(compute: Compute, part: Lowered) -> tuple[str, ...]:
    lying = zip(part.mesh.names, part.values[compute.inputs[0]].placements, strict=True)
    return tuple(name for name, placement in lying if name in DATA and shard_dim(placement) is not None)


def _said(compute: Compute, part: Lowered, axes: tuple[str, ...], rank: int) -> Inside:
    """Means, squared deviations and a count go round; in the backward, two sums a channel."""
    given = part.values[compute.inputs[0]]
    channels, size = given.local(part.mesh, rank)[1], max(given.dtype.itemsize, 4)
    ranks = part.mesh.along(*axes, rank=rank)
    count, others = 2 * channels + 1, len(ranks) - 1
    words = "means, deviations, count"
    told = Talk("all_gather", axes, ranks, count * others * size, (count,), (len(ranks), count), words, True)
    received = round(2 * 2 * channels * size * others / len(ranks))
    sums = (2, channels)
    back = Talk("all_reduce", axes, ranks, received, sums, sums, "sum, of gradients a channel", True)
    return Inside("statistics of the whole batch", (told,), (back,) if compute.name in part.trace.tracked else ())
