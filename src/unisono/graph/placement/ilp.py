"""Integer programming over all placements: the best there is, by scipy's HiGHS.

The problem of problem.py with a variable for each choice and for each move:

    x[n, c] in {0, 1}       node n takes choice c                      sum_c x[n, c] = 1                  `_nodes`
    f[t, u, l, d] >= 0      user u gets tensor t from layout l in demand d
                            sum_d f[t, u, l, d] = sum of x[source of t, c] over choices c that leave it as l
                            sum_l f[t, u, l, d] = sum of x[u, c] over choices c that demand d            `_flow`
    y[t, l, d] >= f[t, u, l, d] for every user u                       a move is paid once               `_shared`
    sum bytes x <= memory                                                                                `_memory`
    minimise sum seconds x + sum moves y

Where x is integer, so are f and y, and the relaxation is tight enough that blocks of real models
are solved at the root or close to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from unisono.errors import MissingPackageError, UsageError
from unisono.graph.capture.trace import Trace
from unisono.graph.marks.spec import Mark
from unisono.graph.placement.assignment import Assignment
from unisono.graph.placement.problem import DeviceRates, Problem, TensorFlow
from unisono.mesh.mesh import Mesh

TIME_LIMIT = 120.0  # seconds; what is found by then is taken, if it is proved to be within GAP of the best
GAP = 1e-6
_TIE = 1e-6  # of a choice's index in its list: of equals the simplest is taken


def exact(
    trace: Trace,
    mesh: Mesh,
    marks: Iterable[Mark] = (),
    *,
    rates: DeviceRates | None = None,
    memory: float | None = None,
    fully_use_devices: bool = False,
    time_limit: float = TIME_LIMIT,
) -> Assignment:
    """The assignment with the least time, of those that keep the marks and fit `memory` bytes on a rank."""
    problem = Problem.of(trace, mesh, marks, rates, memory, fully_use_devices)
    return problem.assignment(solve(problem, time_limit))


def solve(problem: Problem, time_limit: float = TIME_LIMIT) -> dict[str, int]:
    """The number of each node's choice."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError:
        raise MissingPackageError("scipy", "search='exact'", "plan") from None
    program = _Program(problem)
    program.build()
    scale = 1 / max(max(program.costs), 1e-300)
    matrix = csr_array((program.values, (program.rows, program.columns)), shape=(len(program.low), len(program.costs)))
    found = milp(
        np.array(program.costs) * scale,
        integrality=np.array(program.full),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, np.array(program.low), np.array(program.high)),
        options={"time_limit": time_limit, "mip_rel_gap": GAP},
    )
    if found.status == 2:
        least = min_bytes(problem)
        raise UsageError(
            f"no placements on {problem.mesh} fit {problem.memory or 0:.4g} bytes a rank; parameters and activations "
            f"need {least:.4g} at least: use more ranks, or give more memory"
        )
    if found.x is None:
        raise UsageError(
            f"search='exact' found nothing within {time_limit:g} s ({found.message}); use search='dynamic', or trace a "
            "block of the model instead of all of it"
        )
    return {
        name: max(range(len(problem.choices[name])), key=lambda c: found.x[first + c])
        for name, first in program.first.items()
    }


def min_bytes(problem: Problem) -> float:
    return sum(min(choice.bytes for choice in choices) for choices in problem.choices.values())


@dataclass
class _Program:
    """Rows and columns of the integer program."""

    problem: Problem
    costs: list[float] = field(default_factory=list)
    full: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    first: dict[str, int] = field(default_factory=dict)  # each node's first variable

    def build(self) -> None:
        self._nodes()
        for flow in self.problem.flows:
            self._flow(flow)
        self._memory()

    def _variable(self, cost: float, is_full: bool = False) -> int:
        self.costs.append(cost)
        self.full.append(int(is_full))
        return len(self.costs) - 1

    def _row(self, terms: Iterable[tuple[int, float]], low: float, high: float) -> None:
        for column, value in terms:
            self.rows.append(len(self.low))
            self.columns.append(column)
            self.values.append(value)
        self.low.append(low)
        self.high.append(high)

    def _nodes(self) -> None:
        typical = max((choice.seconds for each in self.problem.choices.values() for choice in each), default=0.0)
        for name, choices in self.problem.choices.items():
            numbers = [
                self._variable(choice.seconds + _TIE * _TIE * typical * index, is_full=True)
                for index, choice in enumerate(choices)
            ]
            self.first[name] = numbers[0]
            self._row([(number, 1.0) for number in numbers], 1, 1)

    def _flow(self, flow: TensorFlow) -> None:
        """Leave out what is free anyway: a tensor whose every move costs nothing."""
        if not any(seconds for row in flow.moves for seconds in row):
            return
        is_shared = len(flow.users) > 1
        paid: dict[tuple[int, int], int] = {}
        for user, demand_of in zip(flow.users, flow.demand_of, strict=True):
            mine: dict[tuple[int, int], int] = {}
            for layout in range(len(flow.layouts)):
                for demand in sorted(set(demand_of)):
                    seconds = flow.moves[layout][demand]
                    mine[layout, demand] = self._variable(0.0 if is_shared else seconds)
            self._balance(flow, user, demand_of, mine)
            if is_shared:
                self._shared(flow, mine, paid)

    def _balance(self, flow: TensorFlow, user: str, demand_of: list[int], mine: dict[tuple[int, int], int]) -> None:
        source, target = self.first[flow.source], self.first[user]
        for layout in range(len(flow.layouts)):
            leaving = [(number, 1.0) for (left, _), number in mine.items() if left == layout]
            made = [(source + c, -1.0) for c, left in enumerate(flow.layout_of) if left == layout]
            self._row([*leaving, *made], 0, 0)
        for demand in sorted(set(demand_of)):
            arriving = [(number, 1.0) for (_, d), number in mine.items() if d == demand]
            wanted = [(target + c, -1.0) for c, d in enumerate(demand_of) if d == demand]
            self._row([*arriving, *wanted], 0, 0)

    def _shared(self, flow: TensorFlow, mine: dict[tuple[int, int], int], paid: dict[tuple[int, int], int]) -> None:
        for index, number in mine.items():
            seconds = flow.moves[index[0]][index[1]]
            if seconds:
                if index not in paid:
                    paid[index] = self._variable(seconds)
                self._row([(paid[index], 1.0), (number, -1.0)], 0, np.inf)

    def _memory(self) -> None:
        if self.problem.memory is None:
            return
        unit = max(self.problem.memory, 1.0)
        terms: list[tuple[int, float]] = []
        for name, choices in self.problem.choices.items():
            terms += [(self.first[name] + c, choice.bytes / unit) for c, choice in enumerate(choices) if choice.bytes]
        self._row(terms, -np.inf, self.problem.memory / unit)
