"""Recursive search: the ranks are divided axis by axis, and on each axis the ops, the one with the most work first.

MindSpore's name for it is recursive_programming. It recurses twice: over the ranks, which each axis of the mesh divides
once more, so that a mesh of (2, 2, 2) halves them three times; and within an axis over the ops, in the order of the
work that the axes before have left each rank. An op is divided along the dim that costs the least to divide, given

    the seconds that a rank still computes afterwards,
    what neighbours that are decided on this axis make it move, forward and backward,
    what those that are not decided make it move at least.

The last of them is what sharding costs by itself: dividing the contracted dim of a product leaves parts of a sum,
dividing the batch leaves parts of the weight's gradient, and so an op that stands alone is sharded along its longest
dim. Parameters and inputs come after all ops and take the placement that suits their users. Nothing is looked at twice:
the time is that of one pass over the graph for each axis, however many placements there are. The price is that an op
that is divided early cannot know what later ones would have liked: `benchmarks/searches.py` compares the searches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import fx

from unisono.graph.capture.op import TensorSpec
from unisono.graph.capture.trace import Trace
from unisono.graph.marks.spec import Mark
from unisono.graph.placement import cost
from unisono.graph.placement.assignment import Assignment, divided, producers
from unisono.graph.placement.problem import DeviceRates, OpChoice, Problem
from unisono.graph.rules.option import Option
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placements

Left = dict[str, list[OpChoice]]  # for each node, the choices that the axes so far leave it


def recursive(
    trace: Trace,
    mesh: Mesh,
    marks: Iterable[Mark] = (),
    *,
    rates: DeviceRates | None = None,
    fully_use_devices: bool = False,
) -> Assignment:
    """An assignment that keeps the marks, found in one pass over the graph for each axis of the mesh."""
    problem = Problem.of_nodes(trace, mesh, marks, rates, fully=fully_use_devices)
    return problem.assignment(solve(problem))


def solve(problem: Problem) -> dict[str, int]:
    """The number of each node's choice."""
    left: Left = {name: list(choices) for name, choices in problem.choices.items()}
    for axis in range(problem.mesh.ndim):
        decided = _Division(problem, axis, left).run()
        for name, option in decided.items():
            left[name] = [choice for choice in left[name] if choice.options[axis] == option]
    return {name: problem.choices[name].index(choices[0]) for name, choices in left.items()}


class _Division:
    """The division of all ops along one axis, given that along the axes before it."""

    def __init__(self, problem: Problem, axis: int, left: Left) -> None:
        self._problem = problem
        self._axis = axis
        self._size = problem.mesh.shape[axis]
        self._line = Mesh.describe((self._size,), ("axis",))
        self._wire = (problem.rates.wires(problem.mesh)[axis],)
        self._before = {name: choices[0].options[:axis] for name, choices in left.items()}
        self._seconds = {name: self._undivided(choices[0]) for name, choices in left.items()}
        self._options = {
            name: list(dict.fromkeys(choice.options[axis] for choice in choices)) for name, choices in left.items()
        }
        self._decided: dict[str, Option] = {}
        self._users: dict[str, list[tuple[str, int, int]]] = {}  # (user, its input, which output of the source)
        nodes: list[fx.Node] = list(problem.trace.graph.nodes)
        self._sources = {node.name: producers(node) for node in nodes}
        for name, sources in self._sources.items():
            for i, (source, output) in enumerate(sources):
                self._users.setdefault(source, []).append((name, i, output))
        self._given = [node.name for node in nodes if node.op == "placeholder"]
        self._ops = [node.name for node in nodes if node.op != "placeholder"]

    def _undivided(self, choice: OpChoice) -> float:
        """What a rank computes of the op before this axis and those after it divide it."""
        sizes = self._problem.mesh.shape[self._axis :]
        later = zip(choice.options[self._axis :], sizes, strict=True)
        return choice.seconds * math.prod(size for option, size in later if option.splits)

    def run(self) -> dict[str, Option]:
        for name in sorted(self._ops, key=lambda name: -self._seconds[name]):
            self._decided[name] = self._best(name)
        for name in self._given:
            self._decided[name] = self._best(name)
        return self._decided

    def _best(self, name: str) -> Option:
        """Of options that cost the same, one that divides the op."""
        return min(self._options[name], key=lambda option: (self._cost(name, option), not option.splits))

    def _cost(self, name: str, option: Option) -> float:
        total = self._seconds[name] / (self._size if option.splits else 1)
        for i, (source, output) in enumerate(self._sources[name]):
            wanted = (option.inputs[i],), self._back(source, name, option, i)
            total += min(
                self._move(source, output, (given.outputs[output],), *wanted) for given in self._possible(source)
            )
        paid: set[tuple[int, Placements, Placements | None]] = set()  # users that want the tensor alike share its move
        for user, i, output in self._users.get(name, ()):
            seconds, demand = self._least(name, output, option, user, i)
            if demand not in paid:
                paid.add(demand)
                total += seconds
        return total

    def _least(
        self, name: str, output: int, option: Option, user: str, i: int
    ) -> tuple[float, tuple[int, Placements, Placements | None]]:
        """The cheapest way in which a user can take what the option makes: its seconds, and what is demanded."""
        found = []
        for each in self._possible(user):
            wanted, back = (each.inputs[i],), self._back(name, user, each, i)
            found.append((self._move(name, output, (option.outputs[output],), wanted, back), (output, wanted, back)))
        return min(found, key=lambda pair: pair[0])

    def _possible(self, name: str) -> list[Option]:
        return [self._decided[name]] if name in self._decided else self._options[name]

    def _back(self, source: str, user: str, option: Option, i: int) -> Placements | None:
        """How the gradient of a user's input comes back, if it has one."""
        tracked = self._problem.trace.tracked
        has_gradient = source in tracked and (user == "output" or user in tracked)
        return (option.gradient(i),) if has_gradient else None

    def _move(
        self, source: str, output: int, current: Placements, wanted: Placements, back: Placements | None
    ) -> float:
        """Seconds along this axis, of the tensor as the axes before leave it."""
        spec = self._problem.trace.specs[source][output]
        earlier = tuple(option.outputs[output] for option in self._before[source])
        local = TensorSpec(divided(spec.shape, earlier, self._problem.mesh.shape), spec.dtype)
        return cost.edge(local, self._line, current, wanted, back, self._wire).seconds
