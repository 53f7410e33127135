"""Propagation: from some marks to an Assignment of everything.

Axis by axis of the mesh. Marked nodes come first and keep what they are given. From those that an axis shards,
placements propagate over the graph, to users and to producers, wave by wave: a node that a wave reaches takes the
option that costs the least to communicate with the neighbours that have theirs, and that the axes before this one leave
divisible. When all have one, nodes are looked at again, with all neighbours known, until none gets cheaper: that
settles conflicts between waves that met. Where no wave reaches, ranks do the same.

What counts of an edge is what its execution costs: bytes both ways and a constant a collective, once for users that
want a tensor alike. Only the sum of a parameter's gradients over ranks that share the batch does not count, or small
batches would be gathered to avoid it. Products that every rank does in full count for what they waste. Who uses a
marked tensor takes it as it is placed, if it can. fully_use_devices: a node prefers options that let every rank do a
share of the work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from unisono.graph.capture.op import TensorSpec
from unisono.graph.capture.trace import Trace
from unisono.graph.marks.spec import Mark
from unisono.graph.placement import cost
from unisono.graph.placement.assignment import Assignment, divided, divides, producers
from unisono.graph.placement.cost import AxisLink
from unisono.graph.placement.strategy import placements_of_marks, unkept
from unisono.graph.rules.option import REPLICATE, Option
from unisono.graph.rules.registry import options
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placement, Placements, is_partial, shard_dim
from unisono.mesh.route import LOCAL_COST, STEP_COST

SWEEPS = 8  # how often all nodes are looked at again, at most; in practice three are enough

FLOPS_A_BYTE = 1000  # how many a device does while it receives one
LEAVING_A_MARK = 1e15  # more than anything costs
NOTHING = 1e-12  # seconds: distinguishes an edge that costs nothing from one on which nothing happens


def propagate(
    trace: Trace,
    mesh: Mesh,
    marks: Iterable[Mark] = (),
    *,
    fully_use_devices: bool = False,
    links: Sequence[AxisLink] | None = None,
) -> Assignment:
    """Placements for every node, from the trace's own marks and further ones. `links`, one an axis of the mesh, weigh
    seconds instead of bytes."""
    fixed = placements_of_marks(trace, mesh, (*trace.marks, *marks))
    graph = _Graph(trace, fully_use_devices)
    chosen: dict[str, list[Option]] = {node.name: [] for node in graph.nodes}
    for axis, size in enumerate(mesh.shape):
        link = None if links is None else links[axis]
        on_axis = {slot: placements[axis] for slot, placements in fixed.items()}
        waves = _Axis(graph, mesh, axis, size, link, chosen, on_axis)
        for name, option in waves.run().items():
            chosen[name].append(option)
    assignment = Assignment(trace, mesh, {name: tuple(given) for name, given in chosen.items()})
    assignment.check()
    return assignment


class _Graph:
    """The trace as nodes and edges, with each node's options: the same for all axes."""

    def __init__(self, trace: Trace, fully: bool) -> None:
        self.trace = trace
        self.fully = fully
        self.nodes: list[fx.Node] = list(trace.graph.nodes)
        self.options = {node.name: options(node) for node in self.nodes}
        self.sources = {node.name: producers(node) for node in self.nodes}
        self.users: dict[str, list[tuple[str, int, int]]] = defaultdict(list)  # (user, its input, my output)
        for name, sources in self.sources.items():
            for i, (source, output) in enumerate(sources):
                self.users[source].append((name, i, output))
        self.flops = {op.name: op.flops for op in trace.ops}
        self.is_placeholder = {node.name for node in self.nodes if node.op == "placeholder"}

    def spec(self, name: str, output: int) -> TensorSpec:
        return self.trace.specs[name][output]

    def has_gradient(self, source: str, user: str) -> bool:
        return source in self.trace.tracked and (user == "output" or user in self.trace.tracked)


@dataclass
class _Axis:
    """The choice of options on one axis, given those on the axes before it."""

    graph: _Graph
    mesh: Mesh
    axis: int
    size: int
    link: AxisLink | None
    before: dict[str, list[Option]]
    marked: dict[tuple[str, bool, int], Placement]
    chosen: dict[str, Option] = field(default_factory=dict)
    _line: Mesh = field(init=False)
    _allowed: dict[str, list[Option]] = field(default_factory=dict)

    def run(self) -> dict[str, Option]:
        self._line = Mesh.describe((self.size,), ("axis",))
        for node in self.graph.nodes:
            self._allowed[node.name] = self._possible(node.name)
        order = [node.name for node in self.graph.nodes]
        seeds = {slot[0] for slot, placement in self.marked.items() if placement != REPLICATE}
        for name in order:
            if name in seeds:
                self.chosen[name] = self._best(name)
        self._propagate_from_marks(order)
        for name in order:
            if name not in self.chosen:
                self.chosen[name] = self._best(name)
        self._settle(order)
        return self.chosen

    # ---- which options there are ---------------------------------------------------------------------------------

    def _possible(self, name: str) -> list[Option]:
        """Options that keep the marks and divide; where devices are to be used fully, those that split, if any."""
        wanted = {key[1:]: placement for key, placement in self.marked.items() if key[0] == name}
        fitting = [option for option in self.graph.options[name] if self._keeps(option, wanted)]
        possible = [option for option in fitting if self._divides(name, option)]
        if not possible:
            node = self.graph.trace.node(name)
            raise unkept(self.graph.trace, node, self.mesh, [(placement,) for placement in wanted.values()])
        if self.graph.fully and self.size > 1 and name not in self.graph.is_placeholder and name != "output":
            possible = [option for option in possible if option.splits] or possible
        return possible

    def _keeps(self, option: Option, wanted: dict[tuple[bool, int], Placement]) -> bool:
        return all(
            (option.inputs if is_input else option.outputs)[number] == placement
            for (is_input, number), placement in wanted.items()
        )

    def _divides(self, name: str, option: Option) -> bool:
        sizes = self.mesh.shape[: self.axis + 1]
        for i, (source, output) in enumerate(self.graph.sources[name]):
            earlier = tuple(past.inputs[i] for past in self.before[name])
            if not divides(self.graph.spec(source, output).shape, (*earlier, option.inputs[i]), sizes):
                return False
        for output, placement in enumerate(option.outputs):
            earlier = tuple(past.outputs[output] for past in self.before[name])
            if not divides(self.graph.spec(name, output).shape, (*earlier, placement), sizes):
                return False
        return True

    # ---- waves ---------------------------------------------------------------------------------------------------

    def _propagate_from_marks(self, order: list[str]) -> None:
        """Each wave takes the neighbours of what the last one sharded; it ends at nodes that are better replicated."""
        position = {name: i for i, name in enumerate(order)}
        edge = set(self.chosen)
        while edge:
            near = {source for name in edge for source, _ in self.graph.sources[name]}
            near |= {user for name in edge for user, _, _ in self.graph.users[name]}
            edge = {name for name in near if name not in self.chosen}
            for name in sorted(edge, key=position.__getitem__):
                self.chosen[name] = self._best(name)
            edge = {name for name in edge if self.chosen[name].splits}

    def _settle(self, order: list[str]) -> None:
        """What is sharded may be sharded otherwise, but not given up: that would follow from small sizes alone."""
        for _ in range(SWEEPS):
            changed = False
            for name in (*order, *reversed(order)):
                best = self._best(name)
                if self.chosen[name].splits and not best.splits and name not in self.graph.is_placeholder:
                    continue
                if best != self.chosen[name] and self._weight(name, best) < self._weight(name, self.chosen[name]):
                    self.chosen[name] = best
                    changed = True
            if not changed:
                return

    def _best(self, name: str) -> Option:
        """The cheapest; of equals the one that splits least work, and then the one that distributes shards over
        dims."""
        allowed = [option for option in self._allowed[name] if self._takes_sums_that_are(name, option)]
        allowed = allowed or self._allowed[name]
        if len(allowed) == 1:
            return allowed[0]
        return min(
            allowed, key=lambda option: (self._weight(name, option), option.splits, self._crowding(name, option))
        )

    def _takes_sums_that_are(self, name: str, option: Option) -> bool:
        """A sum in parts is passed on only by ops that move or add, and where all they take is so; else it is added
        up. (A full parameter may always be taken as a part: that of one rank.)"""
        made = [(i, s, o) for i, (s, o) in enumerate(self.graph.sources[name]) if s not in self.graph.is_placeholder]
        if not any(is_partial(option.inputs[i]) for i, _, _ in made):
            return True
        if self.graph.flops.get(name):
            return False
        return all(
            is_partial(option.inputs[i]) and source in self.chosen and is_partial(self.chosen[source].outputs[output])
            for i, source, output in made
        )

    def _crowding(self, name: str, option: Option) -> int:
        """How many tensors would be sharded again along a dim that an axis before this one shards."""
        crowded = 0
        for i, placement in enumerate(option.inputs):
            crowded += _sharded_before(placement, [past.inputs[i] for past in self.before[name]])
        for output, placement in enumerate(option.outputs):
            crowded += _sharded_before(placement, [past.outputs[output] for past in self.before[name]])
        return crowded

    # ---- costs ---------------------------------------------------------------------------------------------------

    def _weight(self, name: str, option: Option) -> float:
        """What a node costs under an option: its edges to neighbours that have theirs (a placeholder that has none yet
        will take what suits), and what is wasted where all ranks do the same product."""
        total = 0.0 if option.splits else self._waste(name)
        for i, (source, output) in enumerate(self.graph.sources[name]):
            wanted, gradient = option.inputs[i], option.gradient(i)
            if source in self.chosen:
                if not self._shared(source, output, wanted, gradient, name):
                    total += self._edge(source, output, self.chosen[source].outputs[output], name, wanted, gradient)
            elif source in self.graph.is_placeholder:
                total += min(
                    self._edge(source, output, option_of_source.outputs[output], name, wanted, gradient)
                    for option_of_source in self._allowed[source]
                )
        asked = set()
        for user, i, output in self.graph.users[name]:
            if user in self.chosen:
                wanted, gradient = self.chosen[user].inputs[i], self.chosen[user].gradient(i)
                if (output, wanted, gradient) not in asked:
                    asked.add((output, wanted, gradient))
                    total += self._edge(name, output, option.outputs[output], user, wanted, gradient)
        return total

    def _waste(self, name: str) -> float:
        """Forward and backward of a product are three of its kind; n ranks could each do an n-th."""
        wasted = 3 * self.graph.flops.get(name, 0) * (1 - 1 / self.size) / FLOPS_A_BYTE
        return wasted if self.link is None else wasted / self.link.bandwidth

    def _shared(self, source: str, output: int, wanted: Placement, gradient: Placement, name: str) -> bool:
        """Whether another user has the tensor moved in this way already."""
        return any(
            user != name
            and number == output
            and user in self.chosen
            and (self.chosen[user].inputs[i], self.chosen[user].gradient(i)) == (wanted, gradient)
            for user, i, number in self.graph.users[source]
        )

    def _edge(
        self, source: str, output: int, current: Placement, user: str, wanted: Placement, gradient: Placement
    ) -> float:
        back = (gradient,) if self.graph.has_gradient(source, user) else None
        if current == wanted and (
            back is None or back == (_needed_gradient(current),) or source in self.graph.is_placeholder
        ):
            return 0.0
        links = None if self.link is None else (self.link,)
        spent = cost.edge(self._local(source, output), self._line, (current,), (wanted,), back, links)
        away = LEAVING_A_MARK if self._leaves_mark(source, output, wanted) else 0.0
        if self.link is not None:
            return spent.seconds + NOTHING + away
        return spent.bytes + STEP_COST * spent.collectives + LOCAL_COST + away

    def _leaves_mark(self, source: str, output: int, wanted: Placement) -> bool:
        marked = self.marked.get((source, False, output), REPLICATE)
        return marked != REPLICATE and wanted != marked and not is_partial(marked)

    def _local(self, source: str, output: int) -> TensorSpec:
        """The tensor as the axes before this one leave it."""
        spec = self.graph.spec(source, output)
        earlier: Placements = tuple(past.outputs[output] for past in self.before[source])
        return TensorSpec(divided(spec.shape, earlier, self.mesh.shape), spec.dtype)


def _needed_gradient(placement: Placement) -> Placement:
    return placement if shard_dim(placement) is not None else REPLICATE


def _sharded_before(placement: Placement, earlier: Sequence[Placement]) -> bool:
    return shard_dim(placement) is not None and placement in earlier
