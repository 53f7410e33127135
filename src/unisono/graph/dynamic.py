"""Dynamic programming along the graph.

Nodes are taken in order, each parameter just before its first user. After some nodes, all that the rest can see of them
are the choices of those that have users to come: the frontier. Of all ways to the same choices on the frontier only the
cheapest can be part of the best solution, so a table from frontiers to their cheapest ways is carried along. It is
exact while the table holds all frontiers; where there are more than WIDTH of them, the cheapest are kept.

A memory limit has a price: bytes cost `price` seconds each, and the price is raised until the solution fits. What fits
is then polished: node by node, whatever is cheaper and still fits is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from unisono.errors import UsageError
from unisono.graph.assignment import Assignment
from unisono.graph.exact import min_bytes
from unisono.graph.marks import Mark
from unisono.graph.problem import Flow, Problem, Rates
from unisono.graph.trace import Trace
from unisono.mesh.mesh import Mesh

WIDTH = 256  # frontiers that are carried along
_ROUNDS = 10  # of the search for a price
_SWEEPS = 8  # of polishing


def dynamic(
    trace: Trace,
    mesh: Mesh,
    marks: Iterable[Mark] = (),
    *,
    rates: Rates | None = None,
    memory: float | None = None,
    fully_use_devices: bool = False,
    width: int = WIDTH,
) -> Assignment:
    """An assignment with little time, of those that keep the marks and fit `memory` bytes on a rank."""
    problem = Problem.of(trace, mesh, marks, rates, memory, fully_use_devices)
    return problem.assignment(solve(problem, width))


def solve(problem: Problem, width: int = WIDTH) -> dict[str, int]:
    """The number of each node's choice."""
    free = polished(problem, _walk(problem, 0.0, width))
    if problem.memory is None or problem.held(free) <= problem.memory:
        return free
    price = max(problem.seconds(free), 1e-12) / max(problem.memory, 1.0)
    fitting: list[dict[str, int]] = []
    low, high = 0.0, 0.0
    for _ in range(_ROUNDS):
        tried = _walk(problem, price, width)
        if problem.held(tried) <= problem.memory:
            fitting.append(polished(problem, tried))
            high = price
        else:
            low = price
        price = (low + high) / 2 if high else 8 * price
    if not fitting:
        raise UsageError(
            f"no placements on {problem.mesh} were found that fit {problem.memory:.4g} bytes a rank; parameters and "
            f"activations need {min_bytes(problem):.4g} at least: use more ranks, or give more memory"
        )
    return min(fitting, key=problem.seconds)


def polished(problem: Problem, chosen: dict[str, int]) -> dict[str, int]:
    """The solution, with every node's choice replaced by a cheaper one that fits, until there is none."""
    touching: dict[str, list[Flow]] = {}
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
            costs = {number: _around(problem, touching.get(name, []), chosen | {name: number}, name) for number in fits}
            best = min(fits, key=costs.__getitem__)
            if costs[best] < costs[chosen[name]]:
                held += choices[best].bytes - own
                chosen[name] = best
        if chosen == before:
            break
    return chosen


def _around(problem: Problem, flows: list[Flow], chosen: dict[str, int], name: str) -> float:
    """What a node costs, with all that flows into it and out of it."""
    total = problem.choices[name][chosen[name]].seconds
    for flow in flows:
        wanted = {flow.demand_of[i][chosen[user]] for i, user in enumerate(flow.users)}
        total += sum(flow.moves[flow.layout_of[chosen[flow.source]]][demand] for demand in wanted)
    return total


@dataclass
class _Way:
    """A way to a frontier: its cost, and the choices on it, as a chain."""

    cost: float
    chain: tuple[object, ...]  # (node, choice, chain before it)


@dataclass
class _Walk:
    problem: Problem
    price: float
    width: int
    order: list[str] = field(default_factory=list)
    into: dict[str, list[tuple[Flow, int]]] = field(default_factory=dict)  # flows that a node uses, and as which user
    last: dict[str, int] = field(default_factory=dict)  # when each node is needed last


def _walk(problem: Problem, price: float, width: int) -> dict[str, int]:
    walk = _Walk(problem, price, width)
    _prepare(walk)
    frontier: tuple[str, ...] = ()
    table: dict[tuple[int, ...], _Way] = {(): _Way(0.0, ())}
    for time, name in enumerate(walk.order):
        grown = (*frontier, name)
        kept = tuple(i for i, each in enumerate(grown) if walk.last[each] > time)
        table = _step(walk, name, frontier, table, kept)
        frontier = tuple(grown[i] for i in kept)
    chain: tuple[object, ...] = min(table.values(), key=lambda way: way.cost).chain
    chosen: dict[str, int] = {}
    while chain:
        name, number, chain = chain  # type: ignore[assignment]
        chosen[name] = number  # type: ignore[assignment]
    return chosen


def _prepare(walk: _Walk) -> None:
    for flow in walk.problem.flows:
        for i, user in enumerate(flow.users):
            walk.into.setdefault(user, []).append((flow, i))
    nodes = [node.name for node in walk.problem.trace.graph.nodes]
    given = {node.name for node in walk.problem.trace.graph.nodes if node.op == "placeholder"}
    for name in nodes:
        if name in given:
            continue
        for flow, _ in walk.into.get(name, ()):
            if flow.source in given and flow.source not in walk.order:
                walk.order.append(flow.source)
        walk.order.append(name)
    walk.order += [name for name in nodes if name in given and name not in walk.order]
    when = {name: time for time, name in enumerate(walk.order)}
    walk.last = dict(when)
    for flow in walk.problem.flows:
        walk.last[flow.source] = max(walk.last[flow.source], *(when[user] for user in flow.users))


def _step(
    walk: _Walk, name: str, frontier: tuple[str, ...], table: dict[tuple[int, ...], _Way], kept: tuple[int, ...]
) -> dict[tuple[int, ...], _Way]:
    place = {each: i for i, each in enumerate(frontier)}
    inputs = [(flow, i, place[flow.source]) for flow, i in walk.into.get(name, ())]
    choices = walk.problem.choices[name]
    own = [choice.seconds + walk.price * choice.bytes for choice in choices]
    found: dict[tuple[int, ...], _Way] = {}
    for state, way in table.items():
        for number, seconds in enumerate(own):
            spent = way.cost + seconds
            for flow, i, at in inputs:
                demand = flow.demand_of[i][number]
                if not _is_paid(flow, i, demand, state, place):
                    spent += flow.moves[flow.layout_of[state[at]]][demand]
            grown = (*state, number)
            key = tuple(grown[k] for k in kept)
            if key not in found or spent < found[key].cost:
                found[key] = _Way(spent, (name, number, way.chain))
    if len(found) > walk.width:
        cheapest = sorted(found.items(), key=lambda item: item[1].cost)[: walk.width]
        found = dict(cheapest)
    return found


def _is_paid(flow: Flow, i: int, demand: int, state: tuple[int, ...], place: dict[str, int]) -> bool:
    """Whether a user before this one, still on the frontier, has had the tensor moved in the same way."""
    return any(
        user in place and flow.demand_of[j][state[place[user]]] == demand for j, user in enumerate(flow.users[:i])
    )
