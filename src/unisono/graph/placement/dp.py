"""Dynamic programming along the graph.

Nodes are taken in order, each parameter just before its first user. After some nodes, all that the rest can see of them
are the tensors with users to come: the placement of each, and where it has been moved to already. Call that the
frontier F. With s seconds and b bytes spent on the way to it,

    without a limit     V(F) = min s: only the quickest of all ways to F can be part of the best solution
    under a limit M     V(F) = {(s, b) that no other way to F beats in both}, b + what the rest needs at least <= M

and the best solution is the quickest way to the end, where the frontier is empty. Both are exact while all ways are
carried along. Where they are more than WIDTH, those are that have the least s + p b: without a limit p = 0, under one
it is a price for memory, in seconds a byte. The right price is where the best solution without a limit, paying it,
begins to fit: of two ways it then prefers the one that the limit does. It is found by bisection (Lagrange's
multiplier), and as the right one for all ways need not be that for those at hand, lower ones are tried too.

What has no gradients (masks, tables of positions) costs little and multiplies frontiers. So when all nodes have been
chosen, those with gradients are chosen again beside the others, which stay, and then those; and at last the solution is
polished: node by node, whatever is cheaper and still fits is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from unisono.errors import UsageError
from unisono.graph.capture.trace import Trace
from unisono.graph.marks.spec import Mark
from unisono.graph.placement.assignment import Assignment
from unisono.graph.placement.ilp import min_bytes
from unisono.graph.placement.problem import DeviceRates, Problem, TensorFlow
from unisono.mesh.mesh import Mesh

WIDTH = 4096  # ways that are carried along
_SHARES = (1.0, 0.25, 0.0)  # of the price of memory, that are tried
_ROUNDS = 10  # of the search for a price
_SWEEPS = 8  # of polishing
_BITS = 62  # demands of a tensor that are remembered; a move for another one is paid by every user
Array = np.ndarray[Any, np.dtype[Any]]


def dynamic(
    trace: Trace,
    mesh: Mesh,
    marks: Iterable[Mark] = (),
    *,
    rates: DeviceRates | None = None,
    memory: float | None = None,
    fully_use_devices: bool = False,
    width: int = WIDTH,
) -> Assignment:
    """An assignment with little time, of those that keep the marks and fit `memory` bytes on a rank."""
    problem = Problem.of(trace, mesh, marks, rates, memory, fully_use_devices)
    return problem.assignment(solve(problem, width))


def solve(problem: Problem, width: int = WIDTH) -> dict[str, int]:
    """The number of each node's choice."""
    path = _Path(problem)
    free = polished(problem, path.walk(0.0, width))
    if problem.memory is None or problem.held(free) <= problem.memory:
        return _alternating(problem, path, free, [0.0], width)
    price = _price(problem, path, free, max(1, width // 8))
    prices = [price * share for share in _SHARES]
    fitting = list(filter(None, (path.walk(each, width, problem.memory) for each in prices)))
    if not fitting:
        raise UsageError(
            f"no placements on {problem.mesh} were found that fit {problem.memory:.4g} bytes a rank; parameters and "
            f"activations need {min_bytes(problem):.4g} at least: use more ranks, or give more memory"
        )
    best = min((polished(problem, each) for each in fitting), key=problem.seconds)
    return _alternating(problem, path, best, prices, width)


def _price(problem: Problem, path: _Path, free: dict[str, int], width: int) -> float:
    """The price of memory at which solutions begin to fit."""
    assert problem.memory is not None
    price = max(problem.seconds(free), 1e-12) / max(problem.memory, 1.0)
    low, high = 0.0, 0.0
    for _ in range(_ROUNDS):
        if problem.held(path.walk(price, width)) <= problem.memory:
            high = price
        else:
            low = price
        price = (low + high) / 2 if high else 8 * price
    return high or price


def _alternating(
    problem: Problem, path: _Path, chosen: dict[str, int], prices: list[float], width: int
) -> dict[str, int]:
    """The solution, with the nodes that have gradients chosen again while the others stay, and the other way round."""
    for stays in (False, True):
        fixed = {name: number for name, number in chosen.items() if (name in problem.trace.tracked) == stays}
        walks = (path.walk(price, width, problem.memory, fixed) for price in prices)
        found = [polished(problem, each) for each in walks if each]
        chosen = min([chosen, *found], key=problem.seconds)
    return chosen


def polished(problem: Problem, chosen: dict[str, int]) -> dict[str, int]:
    """The solution, with every node's choice replaced by a cheaper one that fits, until there is none."""
    touching: dict[str, list[TensorFlow]] = {}
    for flow in problem.flows:
        for name in {flow.source, *flow.users}:
            touching.setdefault(name, []).append(flow)
    chosen, held = dict(chosen), problem.held(chosen)
    for _ in range(_SWEEPS):
        before = dict(chosen)
        for name, choices in problem.choices.items():
            own = choices[chosen[name]].bytes
            room = inf if problem.memory is None else max(problem.memory - held + own, own)
            fits = [number for number, choice in enumerate(choices) if choice.bytes <= room]
            near = touching.get(name, [])
            costs = {number: _around(problem, near, chosen, name, number) for number in fits}
            best = min(fits, key=costs.__getitem__)
            if costs[best] < costs[chosen[name]]:
                held += choices[best].bytes - own
                chosen[name] = best
        if chosen == before:
            break
    return chosen


def _around(problem: Problem, flows: list[TensorFlow], chosen: dict[str, int], name: str, number: int) -> float:
    """What a node would cost under the choice of that number, with all that flows into it and out of it."""
    total = problem.choices[name][number].seconds
    for flow in flows:
        wanted = {
            demands[number if user == name else chosen[user]]
            for demands, user in zip(flow.demand_of, flow.users, strict=True)
        }
        moves = flow.moves[flow.layout_of[number if flow.source == name else chosen[flow.source]]]
        total += sum(moves[demand] for demand in wanted)
    return total


# ---- the walk --------------------------------------------------------------------------------------------------------


@dataclass
class _Solutions:
    """Ways to some frontiers: a number each, or a column of numbers."""

    seconds: Array = field(default_factory=lambda: np.zeros(1))
    bytes: Array = field(default_factory=lambda: np.zeros(1))
    layouts: dict[int, Array] = field(default_factory=dict)  # of a tensor (the number of its flow): its layout
    moved: dict[int, Array] = field(default_factory=dict)  # and a bit for each demand that has been paid for

    def take(self, rows: Array) -> _Solutions:
        layouts = {number: column[rows] for number, column in self.layouts.items()}
        moved = {number: column[rows] for number, column in self.moved.items()}
        return _Solutions(self.seconds[rows], self.bytes[rows], layouts, moved)

    @property
    def frontier(self) -> list[Array]:
        return [*self.layouts.values(), *self.moved.values()]


class _Path:
    """The order of nodes, and the tensors between them. Those that cost nothing, wherever they go, are left out."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        costly = [flow for flow in problem.flows if any(seconds for row in flow.moves for seconds in row)]
        self._tensors = [_Tensor(flow) for flow in costly]
        self._order = self._in_order()
        when = {name: time for time, name in enumerate(self._order)}
        self._last = [max(when[user] for user in flow.users) for flow in costly]
        self._made: dict[str, list[int]] = {}
        self._used: dict[str, list[tuple[int, int]]] = {}  # tensors of a node, and as which of their users
        for number, flow in enumerate(costly):
            self._made.setdefault(flow.source, []).append(number)
            for i, user in enumerate(flow.users):
                self._used.setdefault(user, []).append((number, i))
        least = [min(choice.bytes for choice in problem.choices[name]) for name in self._order]
        self._rest = np.append(np.cumsum(least[::-1])[::-1], 0.0)  # the fewest bytes of a node and those after it

    def _in_order(self) -> list[str]:
        nodes = [node.name for node in self._problem.trace.graph.nodes]
        given = {node.name for node in self._problem.trace.graph.nodes if node.op == "placeholder"}
        into: dict[str, list[str]] = {}
        for flow in self._problem.flows:
            for user in flow.users if flow.source in given else ():
                into.setdefault(user, []).append(flow.source)
        order: dict[str, None] = {}
        for name in nodes:
            if name not in given:
                order |= dict.fromkeys([*into.get(name, ()), name])
        return [*order, *(name for name in nodes if name not in order)]

    def walk(
        self, price: float, width: int, fits: float | None = None, fixed: dict[str, int] | None = None
    ) -> dict[str, int]:
        """The best way to the end at a price of memory; with `fits`, the quickest that has no more bytes than that.

        Nodes that are `fixed` have one choice. Nothing where no way fits.
        """
        fixed = fixed or {}
        solutions = _Solutions()
        steps: list[tuple[Array, Array]] = []  # of each way after a node: the way before it, and the node's choice
        for time, name in enumerate(self._order):
            count = 1 if name in fixed else len(self._problem.choices[name])
            before, number = np.divmod(np.arange(solutions.seconds.size * count), count)
            number += fixed.get(name, 0)
            grown = self._grown(solutions.take(before), name, number, time)
            if fits is not None:
                few = np.flatnonzero(grown.bytes + self._rest[time + 1] <= fits)
                if not few.size:
                    return {}
                before, number, grown = before[few], number[few], grown.take(few)
            cost = grown.seconds + price * grown.bytes
            best = _cheapest(grown, cost) if fits is None else _unbeaten(grown)
            if best.size > width:
                best = best[np.argpartition(cost[best], width)[:width]]
            steps.append((before[best], number[best]))
            solutions = grown.take(best)
        at = int(np.argmin(solutions.seconds if fits is not None else solutions.seconds + price * solutions.bytes))
        chosen: dict[str, int] = {}
        for name, (before, number) in zip(reversed(self._order), reversed(steps), strict=True):
            chosen[name], at = int(number[at]), int(before[at])
        return chosen

    def _grown(self, solutions: _Solutions, name: str, number: Array, time: int) -> _Solutions:
        """The ways, gone on with these choices of a node; tensors that nobody needs any more are left behind."""
        choices = self._problem.choices[name]
        solutions.seconds = solutions.seconds + np.array([choice.seconds for choice in choices])[number]
        solutions.bytes = solutions.bytes + np.array([choice.bytes for choice in choices])[number]
        for each, i in self._used.get(name, ()):
            tensor = self._tensors[each]
            demand = tensor.demand_of[i][number]
            cost = tensor.moves[solutions.layouts[each], demand]
            solutions.seconds = solutions.seconds + np.where(solutions.moved[each] >> demand & 1, 0.0, cost)
            # What is placed that way already costs nothing: whether it has been "moved" there makes no difference.
            solutions.moved[each] = solutions.moved[each] | np.where(cost > 0, 1, 0) << demand & tensor.wanted_after[i]
        for each in self._made.get(name, ()):
            solutions.layouts[each] = self._tensors[each].layout_of[number]
            solutions.moved[each] = np.zeros_like(number)
        for each in [each for each in solutions.layouts if self._last[each] <= time]:
            del solutions.layouts[each], solutions.moved[each]
        return solutions


class _Tensor:
    """A flow in arrays."""

    def __init__(self, flow: TensorFlow) -> None:
        self.layout_of = np.array(flow.layout_of)
        self.demand_of = [np.array(demands) for demands in flow.demand_of]
        self.moves = np.array(flow.moves)
        self.wanted_after: list[int] = []  # a bit for each demand that users after this one may have
        for i in range(len(flow.users)):
            later = {demand for demands in flow.demand_of[i + 1 :] for demand in demands}
            self.wanted_after.append(sum(1 << demand for demand in later if demand < _BITS))


def _cheapest(solutions: _Solutions, cost: Array) -> Array:
    """Of all ways to the same frontier, the one of least cost."""
    sort = np.lexsort((cost, *solutions.frontier))
    return sort[_begins(solutions, sort)]


def _unbeaten(solutions: _Solutions) -> Array:
    """Of all ways to the same frontier, those that no other beats in seconds and in bytes."""
    sort = np.lexsort((solutions.bytes, solutions.seconds, *solutions.frontier))
    group = np.cumsum(_begins(solutions, sort))
    size = np.unique(solutions.bytes[sort], return_inverse=True)[1].astype(np.int64)  # whole numbers, in the same order
    size -= group * (size.max() + 1)  # a group begins below all that was before it
    return sort[np.append(True, size[1:] < np.minimum.accumulate(size)[:-1])]


def _begins(solutions: _Solutions, sort: Array) -> Array:
    """Where, in this order of ways, the frontier is another than just before."""
    begins = np.zeros(sort.size, dtype=bool)
    begins[0] = True
    for column in solutions.frontier:
        ordered = column[sort]
        begins[1:] |= ordered[1:] != ordered[:-1]
    return begins
