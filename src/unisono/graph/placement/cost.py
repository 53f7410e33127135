"""What moving tensors costs on a mesh of any size: bytes received by a rank, and seconds by latency and bandwidth.

Nothing here communicates: a plan for 1,024 ranks is weighed in one process, over `Mesh.describe((128, 8), ("dp",
"tp"))`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from unisono.graph.capture.op import TensorSpec
from unisono.graph.placement.assignment import Assignment, Reshard
from unisono.graph.rules.option import output_gradient
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placements
from unisono.mesh.route import RouteStep, find_route


@dataclass(frozen=True)
class AxisLink:
    """The wire along an axis of a mesh: seconds to start a message, bytes a second that a rank receives."""

    latency: float = 1e-5
    bandwidth: float = 1e10


@dataclass(frozen=True)
class Cost:
    """Of a move: bytes that a rank receives, seconds, and the collectives it takes, forward and backward."""

    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    seconds: float = 0.0
    collectives: int = 0

    @property
    def bytes(self) -> float:
        return self.forward_bytes + self.backward_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.forward_bytes + other.forward_bytes,
            self.backward_bytes + other.backward_bytes,
            self.seconds + other.seconds,
            self.collectives + other.collectives,
        )


def edge(
    spec: TensorSpec,
    mesh: Mesh,
    current: Placements,
    wanted: Placements,
    gradient: Placements | None = None,
    links: Sequence[AxisLink] | None = None,
) -> Cost:
    """The cost of redistributing a tensor to `wanted`, and back its gradient (if any), which is placed as `gradient`.

    links: one an axis of the mesh; by default all are alike.
    """
    used = tuple(links) if links is not None else (AxisLink(),) * mesh.ndim
    return _edge(spec, mesh.shape, current, wanted, gradient, used)


@lru_cache(maxsize=65536)
def _edge(
    spec: TensorSpec,
    mesh_shape: tuple[int, ...],
    current: Placements,
    wanted: Placements,
    gradient: Placements | None,
    links: tuple[AxisLink, ...],
) -> Cost:
    there = _communicating(find_route(spec.shape, spec.dtype.itemsize, mesh_shape, current, wanted), mesh_shape)
    back: list[RouteStep] = []
    if gradient is not None:
        needed = tuple(map(output_gradient, current))
        back = _communicating(find_route(spec.shape, spec.dtype.itemsize, mesh_shape, gradient, needed), mesh_shape)
    return Cost(
        sum(step.received for step in there),
        sum(step.received for step in back),
        sum(step_seconds(step, mesh_shape, links) for step in (*there, *back)),
        len(there) + len(back),
    )


def _communicating(route: tuple[RouteStep, ...], mesh_shape: tuple[int, ...]) -> list[RouteStep]:
    return [step for step in route if step.communicates and math.prod(mesh_shape[axis] for axis in step.axes) > 1]


def step_seconds(step: RouteStep, mesh_shape: tuple[int, ...], links: Sequence[AxisLink]) -> float:
    """A ring's time: each of its rounds starts a message; the slowest of the axes' wires carries all bytes."""
    ranks = math.prod(mesh_shape[axis] for axis in step.axes)
    rounds = (2 if step.kind == "all_reduce" else 1) * (ranks - 1)
    latency = max(links[axis].latency for axis in step.axes)
    bandwidth = min(links[axis].bandwidth for axis in step.axes)
    return rounds * latency + step.received / bandwidth


def of_reshard(move: Reshard, mesh: Mesh, links: Sequence[AxisLink] | None = None) -> Cost:
    return edge(move.spec, mesh, move.current, move.wanted, move.gradient, links)


def of_assignment(assignment: Assignment, links: Sequence[AxisLink] | None = None) -> Cost:
    """All that moves in a step of training, parameters' gradients included."""
    total = Cost()
    for move in assignment.reshards():
        total += of_reshard(move, assignment.mesh, links)
    return total
