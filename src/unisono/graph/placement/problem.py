"""The choice of placements as a problem to solve.

    given       nodes n of the graph with their choices c (one option an axis of the mesh), tensors t with their users u
    minimise    sum_n seconds(n, c_n)  +  sum_t sum_d move(t, layout_t, d)       over the choices c_n
    where       layout_t is how t's source leaves it under its choice,
                d runs over the different demands of t's users: how it is wanted, and how its gradient comes back
    subject to  sum_n bytes(n, c_n) <= memory

Users that want a tensor alike share one move, so d runs over demands and not over users. `seconds` is what a rank
computes: a product or a pass over memory, divided among the ranks that share it (`DeviceRates`). `move` is latency and
bytes of the collectives, forward and backward (cost.py). `bytes` is what a rank holds: a parameter with its gradient
and two numbers of optimizer state, an activation that the backward needs. Marks leave a node only the choices that keep
them.

`dp.py` solves it node by node along the graph, `ilp.py` by integer programming; `recursive.py` divides the ops of most
work first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import fx

from unisono.graph.capture.op import TensorSpec
from unisono.graph.capture.trace import Trace
from unisono.graph.marks.spec import Mark
from unisono.graph.placement import cost
from unisono.graph.placement.assignment import Assignment, divided, divides, producers
from unisono.graph.placement.cost import AxisLink
from unisono.graph.placement.strategy import placements_of_marks, unkept
from unisono.graph.rules.option import Option
from unisono.graph.rules.registry import options
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placements

STATES = 4  # tensors that a trained parameter needs: itself, its gradient, two of an optimizer such as Adam
PASSES = 3  # a forward, and a backward of twice its work


@dataclass(frozen=True)
class DeviceRates:
    """What a device does in a second, and the wires along the axes (by default all alike)."""

    flops: float = 1e13
    memory: float = 1e12  # bytes
    link: AxisLink = field(default_factory=AxisLink)
    links: tuple[AxisLink, ...] | None = None

    def wires(self, mesh: Mesh) -> tuple[AxisLink, ...]:
        return self.links if self.links is not None else (self.link,) * mesh.ndim


class OpChoice(NamedTuple):
    options: tuple[Option, ...]  # one an axis
    seconds: float
    bytes: float


class Demand(NamedTuple):
    wanted: Placements
    gradient: Placements | None


@dataclass
class TensorFlow:
    """One tensor: how its source's choices leave it, what its users' choices demand, what each move costs."""

    source: str
    layouts: list[Placements]
    layout_of: list[int]  # by choice of the source
    users: list[str]
    demands: list[Demand]
    demand_of: list[list[int]]  # for each user, by its choice
    moves: list[list[float]]  # seconds, by layout and demand


@dataclass
class Problem:
    trace: Trace
    mesh: Mesh
    rates: DeviceRates = field(default_factory=DeviceRates)
    memory: float | None = None  # bytes a rank may hold
    fully: bool = False  # whether every op must be shared among all ranks that can share it
    choices: dict[str, list[OpChoice]] = field(default_factory=dict)
    flows: list[TensorFlow] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        trace: Trace,
        mesh: Mesh,
        marks: Iterable[Mark] = (),
        rates: DeviceRates | None = None,
        memory: float | None = None,
        fully: bool = False,
    ) -> Problem:
        problem = cls.of_nodes(trace, mesh, marks, rates, memory, fully)
        problem._connect()
        return problem

    @classmethod
    def of_nodes(
        cls,
        trace: Trace,
        mesh: Mesh,
        marks: Iterable[Mark] = (),
        rates: DeviceRates | None = None,
        memory: float | None = None,
        fully: bool = False,
    ) -> Problem:
        """The choices of nodes alone: what tensors between them cost takes most of the time to make."""
        problem = cls(trace, mesh, rates or DeviceRates(), memory, fully)
        problem._choose(placements_of_marks(trace, mesh, (*trace.marks, *marks)))
        return problem

    def assignment(self, chosen: dict[str, int]) -> Assignment:
        made = {name: self.choices[name][number].options for name, number in chosen.items()}
        found = Assignment(self.trace, self.mesh, made)
        found.check()
        return found

    def seconds(self, chosen: dict[str, int]) -> float:
        """The value of a solution."""
        computed = sum(self.choices[name][number].seconds for name, number in chosen.items())
        moved = 0.0
        for flow in self.flows:
            layout = flow.layout_of[chosen[flow.source]]
            wanted = {flow.demand_of[i][chosen[user]] for i, user in enumerate(flow.users)}
            moved += sum(flow.moves[layout][demand] for demand in wanted)
        return computed + moved

    def held(self, chosen: dict[str, int]) -> float:
        """Bytes that a rank holds."""
        return sum(self.choices[name][number].bytes for name, number in chosen.items())

    # ---- nodes ---------------------------------------------------------------------------------------------------

    def _choose(self, fixed: dict[tuple[str, bool, int], Placements]) -> None:
        work = {op.name: op for op in self.trace.ops}
        for node in self.trace.graph.nodes:
            listed = options(node)
            wanted = {slot[1:]: placements for slot, placements in fixed.items() if slot[0] == node.name}
            made = []
            for some in itertools.product(listed, repeat=self.mesh.ndim):
                if self._keeps(some, wanted) and self._divides(node, some):
                    made.append(some)
            if not made:
                raise unkept(self.trace, node, self.mesh, list(wanted.values()))
            if self.fully and node.op == "call_function":
                most = max(sum(option.splits for option in some) for some in made)
                made = [some for some in made if sum(option.splits for option in some) == most]
            op = work.get(node.name)
            for some in made:
                ranks = math.prod(size for option, size in zip(some, self.mesh.shape, strict=True) if option.splits)
                seconds = 0.0
                if op is not None:
                    passes = PASSES if node.name in self.trace.tracked else 1
                    each = op.flops / self.rates.flops + op.bytes_moved / self.rates.memory
                    seconds = passes * each / ranks
                choice = OpChoice(some, seconds, self._bytes(node.name, some, ranks))
                self.choices.setdefault(node.name, []).append(choice)

    def _keeps(self, some: tuple[Option, ...], wanted: dict[tuple[bool, int], Placements]) -> bool:
        return all(
            (option.inputs if is_input else option.outputs)[number] == placements[axis]
            for (is_input, number), placements in wanted.items()
            for axis, option in enumerate(some)
        )

    def _divides(self, node: fx.Node, some: tuple[Option, ...]) -> bool:
        for i, (source, output) in enumerate(producers(node)):
            layout = tuple(option.inputs[i] for option in some)
            if not divides(self.trace.specs[source][output].shape, layout, self.mesh.shape):
                return False
        for output in range(len(some[0].outputs)):
            layout = tuple(option.outputs[output] for option in some)
            if not divides(self.trace.specs[node.name][output].shape, layout, self.mesh.shape):
                return False
        return True

    def _bytes(self, name: str, some: tuple[Option, ...], ranks: int) -> float:
        if name in self.trace.parameters:
            spec = self.trace.specs[name][0]
            shard = divided(spec.shape, tuple(option.outputs[0] for option in some), self.mesh.shape)
            times = STATES if name in self.trace.tracked else 1
            return times * math.prod(shard) * spec.dtype.itemsize
        return self._saved.get(name, 0) / ranks

    @cached_property
    def _saved(self) -> dict[str, int]:
        return {op.name: op.saved for op in self.trace.ops}

    # ---- edges ---------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        users: dict[tuple[str, int], list[tuple[str, int]]] = {}
        for node in self.trace.graph.nodes:
            for i, tensor in enumerate(producers(node)):
                users.setdefault(tensor, []).append((node.name, i))
        for (source, output), wanting in users.items():
            self.flows.append(self._flow(source, output, wanting))

    def _flow(self, source: str, output: int, wanting: list[tuple[str, int]]) -> TensorFlow:
        layouts: dict[Placements, int] = {}
        layout_of = [
            layouts.setdefault(tuple(option.outputs[output] for option in choice.options), len(layouts))
            for choice in self.choices[source]
        ]
        demands: dict[Demand, int] = {}
        demand_of = []
        for user, i in wanting:
            has_gradient = source in self.trace.tracked and (user == "output" or user in self.trace.tracked)
            mine = []
            for choice in self.choices[user]:
                gradient = tuple(option.gradient(i) for option in choice.options) if has_gradient else None
                demand = Demand(tuple(option.inputs[i] for option in choice.options), gradient)
                mine.append(demands.setdefault(demand, len(demands)))
            demand_of.append(mine)
        spec: TensorSpec = self.trace.specs[source][output]
        wires = self.rates.wires(self.mesh)
        moves = [
            [cost.edge(spec, self.mesh, layout, demand.wanted, demand.gradient, wires).seconds for demand in demands]
            for layout in layouts
        ]
        names = [user for user, _ in wanting]
        return TensorFlow(source, list(layouts), layout_of, names, list(demands), demand_of, moves)
