"""Where to split a row of blocks into stages.

Given the cost c_i of each block, choose the first block of each stage so that the costliest stage, which sets the
pace of the full pipeline, costs as little as possible; of the splits that agree in that, take the most even one:

    minimise   max_s C_s,   then   sum_s C_s^2,      C_s = sum of c_i over the blocks of stage s, none of them empty

Both are found exactly: `_lowest_peak` by dynamic programming over (stages, blocks), then `_most_even` likewise among
the stages that stay below that peak. What the model does before its first block and after its last one belongs to
those blocks' costs, since it is done on those stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from unisono.errors import UsageError

_TOLERANCE = 1e-9


def balanced(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """The first block of each stage."""
    require_enough(len(costs), stages)
    if any(cost < 0 for cost in costs):
        raise UsageError(f"costs of blocks must not be negative: {list(costs)}")
    sums = [0.0, *accumulate(float(cost) for cost in costs)]
    return _most_even(sums, stages, _lowest_peak(sums, stages))


def quickly_balanced(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """As `balanced`, in time for a planner that asks thousands of times: the lowest peak, by bisection, and stages that
    are about even."""
    require_enough(len(costs), stages)
    low, high = max(max(costs), sum(costs) / stages), float(sum(costs))
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if _packed(costs, stages, middle) else (middle, high)
    starts = _packed(costs, stages, high)
    assert starts is not None
    return starts


def _packed(costs: Sequence[float], stages: int, peak: float) -> tuple[int, ...] | None:
    """Stages that cost no more than the peak, each as near to an even share of what is left as that allows."""
    allowed = peak * (1 + _TOLERANCE)
    needed = [0] * (len(costs) + 1)  # the least stages for all blocks from here on, packed from the back
    load, count = 0.0, 0
    for block in range(len(costs) - 1, -1, -1):
        load += costs[block]
        if count == 0 or load > allowed:
            load, count = costs[block], count + 1
        needed[block] = count
    if needed[0] > stages:
        return None
    starts, block, left = [], 0, float(sum(costs))
    for stage in range(stages):
        starts.append(block)
        others = stages - stage - 1
        share, load = left / (others + 1), 0.0
        while block < len(costs) - others:
            grown = load + costs[block]
            must = needed[block] > others  # the stages after this one could not hold it
            if load and not must and (grown > allowed or grown - share > share - load):
                break
            load = grown
            block += 1
        if load > allowed:
            return None
        left -= load
    return tuple(starts) if block == len(costs) else None


def require_enough(blocks: int, stages: int, what: str = "the model") -> None:
    if stages > blocks:
        raise UsageError(
            f"the pipeline has {stages} stages (ranks times chunks), but {what} has only {blocks} blocks to share out; "
            f"use at most {blocks} stages"
        )


def checked(boundaries: Sequence[int], blocks: int, stages: int) -> tuple[int, ...]:
    """Boundaries that were given by hand, if they make sense."""
    given = tuple(boundaries)
    rising = all(low < high for low, high in pairwise(given))
    if len(given) != stages or given[:1] != (0,) or not rising or given[-1] >= blocks:
        raise UsageError(
            f"pipeline boundaries {list(given)}: expected the first block of each of {stages} stages, rising from 0 "
            f"to at most {blocks - 1}"
        )
    return given


def _lowest_peak(sums: Sequence[float], stages: int) -> float:
    blocks = len(sums) - 1
    peak = list(sums)  # of the first n blocks on one stage
    for stage in range(2, stages + 1):
        peak = [
            min((max(peak[start], sums[n] - sums[start]) for start in range(stage - 1, n)), default=float("inf"))
            for n in range(blocks + 1)
        ]
    return peak[blocks]


def _most_even(sums: Sequence[float], stages: int, peak: float) -> tuple[int, ...]:
    blocks = len(sums) - 1
    allowed = peak * (1 + _TOLERANCE)
    # best[n]: the least sum of squares of the first n blocks on so many stages, and where those stages begin
    none: tuple[float, tuple[int, ...]] = (float("inf"), ())
    best = [(0.0, none[1]), *[none] * blocks]
    for _ in range(stages):
        following = [none]
        for n in range(1, blocks + 1):
            choices = [
                (best[start][0] + (sums[n] - sums[start]) ** 2, (*best[start][1], start))
                for start in range(n)
                if sums[n] - sums[start] <= allowed
            ]
            following.append(min(choices, default=none))
        best = following
    return best[blocks][1]
