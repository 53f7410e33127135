"""An Assignment: for every node of a trace, how it runs on each axis of a mesh, and what has to move because of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from unisono.errors import UsageError
from unisono.graph.capture.op import TensorSpec
from unisono.graph.capture.trace import Trace
from unisono.graph.rules.call import OpCall
from unisono.graph.rules.option import Option, output_gradient
from unisono.graph.rules.registry import target_name
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placements, shard_dim


@dataclass(frozen=True)
class Reshard:
    """A tensor that is needed in another placement than it has. Ops that want it alike share one move, and their
    gradients are added up before the one move back."""

    source: str
    output: int  # which of the source's outputs
    spec: TensorSpec
    current: Placements
    wanted: Placements
    gradient: Placements | None  # how the gradients come back; None where there are none
    source_gradient: Placements | None  # how the source needs its gradient
    users: tuple[tuple[str, int], ...]  # (node, number of its tensor input)


@dataclass
class Assignment:
    """`options[name]` has one Option an axis of the mesh, for every node: placeholders (no inputs), ops, and "output"
    (no outputs). `notes` has, by node, remarks on the choice."""

    trace: Trace
    mesh: Mesh
    options: dict[str, tuple[Option, ...]]
    notes: dict[str, str] = field(default_factory=dict)

    def layout(self, name: str, output: int = 0) -> Placements:
        """The placements of a node's output, one for each axis."""
        return tuple(option.outputs[output] for option in self.options[name])

    def wanted(self, name: str, i: int) -> Placements:
        """How a node takes its i-th tensor input."""
        return tuple(option.inputs[i] for option in self.options[name])

    def gradient(self, name: str, i: int) -> Placements:
        """How the gradient of its i-th tensor input comes out of a node's backward."""
        return tuple(option.gradient(i) for option in self.options[name])

    def local(self, name: str) -> str | None:
        """The rewrite that a node runs as, where one of its axes asks for one (see `rewrites`)."""
        return next((option.local for option in self.options[name] if option.local is not None), None)

    def strategy(self, name: str) -> tuple[tuple[int, ...], ...]:
        """The number of shards along each dim of each tensor input: ((2, 4), (4, 1))."""
        sources = producers(self.trace.node(name))
        return tuple(self._shards(self.wanted(name, i), self._spec(*source)) for i, source in enumerate(sources))

    def _shards(self, placements: Placements, spec: TensorSpec) -> tuple[int, ...]:
        counts = [1] * len(spec.shape)
        for axis, placement in enumerate(placements):
            dim = shard_dim(placement)
            if dim is not None:
                counts[dim] *= self.mesh.shape[axis]
        return tuple(counts)

    def local_shape(self, name: str, output: int = 0) -> tuple[int, ...]:
        """The shape of a node's output on each rank: shards are even (see `check`)."""
        spec = self._spec(name, output)
        return divided(spec.shape, self.layout(name, output), self.mesh.shape)

    def _spec(self, name: str, output: int) -> TensorSpec:
        return self.trace.specs[name][output]

    def edges(self) -> Iterator[tuple[str, int, str, int]]:
        """(source, output, user, number of its tensor input) for every tensor that flows."""
        for node in self.trace.graph.nodes:
            for i, (source, output) in enumerate(producers(node)):
                yield source, output, node.name, i

    def reshards(self) -> list[Reshard]:
        """Where tensors have to move, forward or backward, in the order of their sources."""
        groups: dict[tuple[str, int, Placements, Placements | None], list[tuple[str, int]]] = {}
        for source, output, user, i in self.edges():
            gradient = self.gradient(user, i) if self._has_gradient(source, user) else None
            groups.setdefault((source, output, self.wanted(user, i), gradient), []).append((user, i))
        moves = []
        for (source, output, wanted, gradient), users in groups.items():
            current = self.layout(source, output)
            needed = None if gradient is None else tuple(map(output_gradient, current))
            if current != wanted or gradient != needed:
                spec = self._spec(source, output)
                moves.append(Reshard(source, output, spec, current, wanted, gradient, needed, tuple(users)))
        return moves

    def _has_gradient(self, source: str, user: str) -> bool:
        return source in self.trace.tracked and (user == "output" or user in self.trace.tracked)

    def check(self) -> None:
        """UsageError where a node has no options, or a sharded dim does not divide."""
        for node in self.trace.graph.nodes:
            if node.name not in self.options:
                raise UsageError(f"no placements are given for {node.name} ({target_name(node.target)})")
            for what, spec, placements in self._parameter_specs(node):
                if not divides(spec.shape, placements, self.mesh.shape):
                    raise UsageError(
                        f"{what} of {node.name} has shape {spec.shape}, which {self.mesh} does not shard evenly by "
                        f"{placements}"
                    )

    def _parameter_specs(self, node: fx.Node) -> Iterator[tuple[str, TensorSpec, Placements]]:
        for i, (source, output) in enumerate(producers(node)):
            yield f"input {i}", self._spec(source, output), self.wanted(node.name, i)
        for output, spec in enumerate(self.trace.specs[node.name] if node.op != "output" else ()):
            yield f"output {output}", spec, self.layout(node.name, output)


def producers(node: fx.Node) -> list[tuple[str, int]]:
    """For each tensor input of a node, which output of which node it is. Only getitem takes another than the first."""
    if target_name(node.target) == "getitem":
        source, number = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(number, int)
        return [(source.name, number)]
    return [(given.name, 0) for given in OpCall(node).tensors]


def divided(shape: tuple[int, ...], placements: Placements, mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an even shard."""
    sizes = list(shape)
    for axis, placement in enumerate(placements):
        dim = shard_dim(placement)
        if dim is not None:
            sizes[dim] //= mesh_shape[axis]
    return tuple(sizes)


def divides(shape: tuple[int, ...], placements: Placements, mesh_shape: tuple[int, ...]) -> bool:
    """Whether every dim has even shards, but for those of some lengths."""
    counts: dict[int, int] = {}
    for axis, placement in enumerate(placements):
        dim = shard_dim(placement)
        if dim is not None:
            counts[dim] = counts.get(dim, 1) * mesh_shape[axis]
    return all(shape[dim] % count == 0 for dim, count in counts.items())


def replicated(trace: Trace, mesh: Mesh) -> Assignment:
    """Every rank does everything."""
    from unisono.graph.rules import options

    return Assignment(trace, mesh, {node.name: (options(node)[0],) * mesh.ndim for node in trace.graph.nodes})
