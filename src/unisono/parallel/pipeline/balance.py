"""Where to cut a row of blocks into stages.

Given the cost c_i of each block, choose the first block of each stage so that the costliest stage, which sets the
pace of the whole pipeline, costs as little as possible; of the cuts that agree in that, take the most even one:

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
            min((max(peak[cut], sums[n] - sums[cut]) for cut in range(stage - 1, n)), default=float("inf"))
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
                (best[cut][0] + (sums[n] - sums[cut]) ** 2, (*best[cut][1], cut))
                for cut in range(n)
                if sums[n] - sums[cut] <= allowed
            ]
            following.append(min(choices, default=none))
        best = following
    return best[blocks][1]
