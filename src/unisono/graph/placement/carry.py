"""Carrying an assignment over to another trace of the same model: in evaluation mode, or for batches of another size.

Any choice of options is a program with the right result, because moves are put wherever two do not fit. So nodes that
the two traces share keep theirs, and a node that is new, or that does not divide any more, is computed in full by every
rank. Parameters and buffers keep their placements.
"""

from __future__ import annotations

from torch import fx

from unisono.graph.capture.trace import Trace
from unisono.graph.placement.assignment import Assignment, divides, producers
from unisono.graph.rules import options
from unisono.graph.rules.option import Option


def carried(trace: Trace, known: Assignment) -> Assignment:
    """An assignment for `trace` after one that is known for another trace of the same model."""
    old = {node.name: node for node in known.trace.graph.nodes}
    made: dict[str, tuple[Option, ...]] = {}
    for node in trace.graph.nodes:
        before = old.get(node.name)
        chosen = known.options.get(node.name)
        if before is None or chosen is None or not _fits(node, before, chosen, trace, known):
            chosen = (options(node)[0],) * known.mesh.ndim
        made[node.name] = chosen
    return Assignment(trace, known.mesh, made, dict(known.notes))


def _fits(node: fx.Node, before: fx.Node, chosen: tuple[Option, ...], trace: Trace, known: Assignment) -> bool:
    if node.op != before.op or (node.op == "call_function" and node.target != before.target):
        return False
    allowed = options(node)
    if not all(option in allowed for option in chosen):
        return False
    shape = known.mesh.shape
    for i, (source, output) in enumerate(producers(node)):
        if not divides(trace.specs[source][output].shape, tuple(option.inputs[i] for option in chosen), shape):
            return False
    results = trace.specs[node.name] if node.op != "output" else ()
    return all(
        divides(spec.shape, tuple(option.outputs[i] for option in chosen), shape) for i, spec in enumerate(results)
    )
