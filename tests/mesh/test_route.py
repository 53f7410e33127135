"""Routes between placements, as plans: no rank is needed."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from unisono.mesh.placement import Placement
from unisono.mesh.route import find_route

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
LARGE = (4096, 4096)


def kinds(mesh: tuple[int, ...], source: tuple[Placement, ...], target: tuple[Placement, ...]) -> list[str]:
    return [step.kind for step in find_route(LARGE, 4, mesh, source, target)]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((R,), (R,), []),
        ((S0,), (S1,), ["all_to_all"]),
        ((P,), (S1,), ["reduce_scatter"]),
        ((P, P), (R, R), ["all_reduce"]),
        ((P, P), (S0, S1), ["reduce_scatter", "reduce_scatter"]),
        # Sharding before communication makes it smaller.
        ((P, R), (R, S0), ["slice", "all_reduce"]),
        ((S0, P), (R, S1), ["reduce_scatter", "all_gather"]),
    ],
)
def test_the_cheapest(source: tuple[Placement, ...], target: tuple[Placement, ...], expected: list[str]) -> None:
    assert kinds((8,) * len(source), source, target) == expected


def test_what_a_rank_receives() -> None:
    full = 4096 * 4096 * 4
    for source, target, share in [(S0, R, 7 / 8), (P, R, 14 / 8), (P, S0, 7 / 8), (S0, S1, 7 / 64), (R, S0, 0)]:
        route = find_route(LARGE, 4, (8,), (source,), (target,))
        assert sum(step.received for step in route) == full * share


def test_axes_in_each_others_way_step_aside() -> None:
    """The first axis cannot let go of the dim while the second cuts its pieces; gathering all would be 8 times more."""
    route = find_route(LARGE, 4, (8, 8), (S0, S0), (R, S0))
    assert sum(step.received for step in route) < 4096 * 4096 * 4 / 6
    assert "all_to_all" in [step.kind for step in route]


def test_small_tensors_prefer_fewer_steps() -> None:
    assert [step.kind for step in find_route((8, 8), 4, (2, 2), (S0, S0), (R, S0))] == ["all_gather", "slice"]


def test_four_axes() -> None:
    route = find_route((64, 64, 64, 64), 2, (2, 8, 4, 16), (P, S0, S1, P), (S1, Shard(2), R, Shard(3)))
    assert route[-1].axes
    state = [P, S0, S1, P]
    for step in route:
        for axis in step.axes:
            assert state[axis] == step.before
            state[axis] = step.after
    assert state == [S1, Shard(2), R, Shard(3)]
