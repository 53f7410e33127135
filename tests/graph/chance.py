"""Assignments by chance: any choice of options must give the result of one device."""

from __future__ import annotations

import random

from torch import fx

from unisono.graph.capture.trace import Trace
from unisono.graph.placement.assignment import Assignment, divides, producers
from unisono.graph.rules import options
from unisono.graph.rules.option import Option
from unisono.mesh.mesh import Mesh


def chance_assignment(trace: Trace, mesh: Mesh, seed: int) -> Assignment:
    """For each node one of the choices that divide, all equally likely but the one in which nothing is split."""
    rng = random.Random(seed)
    return Assignment(trace, mesh, {node.name: _chosen(node, trace, mesh, rng) for node in trace.graph.nodes})


def _chosen(node: fx.Node, trace: Trace, mesh: Mesh, rng: random.Random) -> tuple[Option, ...]:
    listed = options(node)
    for _ in range(30):
        chosen = tuple(rng.choice(listed[1:] or listed) for _ in range(mesh.ndim))
        if _fits(node, chosen, trace, mesh):
            return chosen
    return (listed[0],) * mesh.ndim


def _fits(node: fx.Node, chosen: tuple[Option, ...], trace: Trace, mesh: Mesh) -> bool:
    shapes = [(trace.specs[s][o].shape, tuple(c.inputs[i] for c in chosen)) for i, (s, o) in enumerate(producers(node))]
    if node.op != "output":
        shapes += [(spec.shape, tuple(c.outputs[i] for c in chosen)) for i, spec in enumerate(trace.specs[node.name])]
    return all(divides(shape, placements, mesh.shape) for shape, placements in shapes)
