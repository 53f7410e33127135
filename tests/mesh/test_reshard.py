"""Every pair of placements: the values, the gradients, and the communication for it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import unisono as uni
from tests.mesh.layouts import averaged, full_values, part_of, placed_by_hand
from tests.ranks import RankPool
from unisono.comm import traffic
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placement, checked, global_shape, local_shape, local_slice
from unisono.mesh.route import find_route

Pools = Callable[[str, int], RankPool]
NAMES = ("a", "b", "c")


def check_pair(shape: Sequence[int], mesh: Mesh, source: Sequence[Placement], target: Sequence[Placement]) -> None:
    """Reshard a tensor and compare its values and its gradient with those of the full tensor."""
    case = f"{tuple(shape)} on {mesh}: {source} -> {target}"
    full, weight = full_values(shape, 1), full_values(shape, 2)
    local, placed = placed_by_hand(full, mesh, source)
    with traffic.counted() as seen:
        moved = uni.reshard(placed, mesh, target)
    assert moved.placements == tuple(target), case
    assert moved.shape == full.shape, case
    assert moved.to_local().shape == local_shape(shape, mesh, target), case
    steps = find_route(tuple(shape), 8, mesh.shape, tuple(source), tuple(target))
    spoken = [step for step in steps if step.communicates and math.prod(mesh.shape[a] for a in step.axes) > 1]
    assert seen.calls.total() == (len(spoken) if full.numel() else 0), case
    reduced = uni.reshard(moved.detach(), mesh, [Replicate()] * mesh.ndim).to_local()
    torch.testing.assert_close(reduced, full, rtol=1e-12, atol=1e-12, msg=lambda text: f"{case}: {text}")
    (moved.to_local() * local_slice(weight, mesh, target)).sum().backward()
    expected = local_slice(weight, mesh, source) * averaged(mesh, target) / averaged(mesh, source)
    torch.testing.assert_close(local.grad, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{case}: {text}")


def check_all_pairs(
    comm: Communicator, shape: Sequence[int], mesh_shape: Sequence[int], dims: Sequence[int], every: int = 1
) -> int:
    mesh = Mesh(mesh_shape, NAMES[: len(mesh_shape)])
    kinds = [Replicate(), Partial(), *(Shard(dim) for dim in dims)]
    layouts = list(itertools.product(kinds, repeat=mesh.ndim))
    pairs = list(itertools.product(layouts, layouts))[::every]
    for source, target in pairs:
        check_pair(shape, mesh, source, target)
    return len(pairs)


@pytest.mark.parametrize("shape", [(8, 4, 4), (5, 7, 3), (3, 2, 1), (9, 1, 6)])
@pytest.mark.parametrize("size", [2, 4])
def test_all_pairs_on_a_line(pools: Pools, size: int, shape: tuple[int, ...]) -> None:
    assert pools("gloo", size).run(check_all_pairs, shape, (size,), (0, 1, 2))[0] == 25


@pytest.mark.parametrize(("every", "pairs"), [(3, 86), pytest.param(1, 256, marks=pytest.mark.thorough)])
def test_all_pairs_on_a_grid(pools: Pools, every: int, pairs: int) -> None:
    """Sharding one dim by both axes included, and sizes that leave some ranks nothing. Every third pair has every
    layout as source and as target."""
    assert pools("gloo", 4).run(check_all_pairs, (5, 3), (2, 2), (0, 1), every)[0] == pairs


def test_some_pairs_over_mpi(pools: Pools) -> None:
    assert pools("mpi", 4).run(check_all_pairs, (5, 3), (2, 2), (0, 1), 7)[0] == 37


def check_cube(comm: Communicator, every: int) -> None:
    mesh = Mesh((2, 2, 2), NAMES)
    R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
    layouts = [(S0, S0, S0), (S0, S1, S0), (P, P, P), (R, R, R), (S1, P, S0), (R, S0, R)]
    for source, target in list(itertools.product(layouts, layouts))[::every]:
        check_pair((11, 6), mesh, source, target)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_cube_of_ranks(pools: Pools, every: int) -> None:
    """Every fifth pair has every layout as source and as target."""
    pools("gloo", 8).run(check_cube, every)


def check_transposed(comm: Communicator) -> None:
    """A mesh whose first axis runs fastest: a group over both axes is not in the order of the mesh."""
    mesh = Mesh((2, 2), ("a", "b"), [[0, 2], [1, 3]])
    for source, target in [
        ((Shard(0), Shard(0)), (Replicate(), Replicate())),
        ((Partial(), Partial()), (Shard(0), Shard(0))),
        ((Shard(0), Shard(0)), (Shard(1), Shard(1))),
    ]:
        check_pair((5, 3), mesh, source, target)


def test_a_mesh_in_another_order(pools: Pools) -> None:
    pools("gloo", 4).run(check_transposed)


def check_other_ops(comm: Communicator) -> None:
    mesh = Mesh((2, 2), ("a", "b"))
    full = full_values((5, 3))
    for op in ("avg", "product", "min", "max"):
        for target in [(Replicate(), Replicate()), (Shard(0), Shard(1)), (Replicate(), Partial(op))]:
            for source in [(Partial(op), Partial(op)), (Shard(0), Partial(op)), (Shard(1), Replicate())]:
                local = part_of(full, mesh, source)
                placed = DTensor.from_local(
                    local, mesh.device_mesh, source, run_check=False, shape=full.shape, stride=full.stride()
                )
                moved = uni.reshard(uni.reshard(placed, mesh, target), mesh, [Replicate()] * 2)
                torch.testing.assert_close(moved.to_local(), full, rtol=1e-12, atol=1e-12)
    check_pair((5, 3), mesh, (Partial("avg"), Shard(0)), (Shard(1), Replicate()))
    check_pair((5, 3), mesh, (Replicate(), Shard(0)), (Partial("avg"), Replicate()))
    check_pair((5, 3), mesh, (Partial("avg"), Partial()), (Partial("avg"), Replicate()))


def test_other_reductions(pools: Pools) -> None:
    pools("gloo", 4).run(check_other_ops)


# ---- communication -----------------------------------------------------------------------------------------------

LINE = [
    # source, target, the one collective, the bytes of this rank's tensor in it, bytes that it sends (8x8 float64, n=4)
    (Shard(0), Replicate(), "all_gather", 128, 384),
    (Partial(), Replicate(), "all_reduce", 512, 768),
    (Partial(), Shard(0), "reduce_scatter", 512, 384),
    (Partial(), Shard(1), "reduce_scatter", 512, 384),
    (Shard(0), Shard(1), "all_to_all", 128, 96),
    (Shard(1), Shard(0), "all_to_all", 128, 96),
    (Replicate(), Shard(1), None, 0, 0),
    (Replicate(), Partial(), None, 0, 0),
    (Shard(0), Partial(), None, 0, 0),
    (Shard(0), Shard(0), None, 0, 0),
    (Partial(), Partial(), None, 0, 0),
]
GRID = [
    # source, target, collectives on a (2, 2) mesh
    ((Partial(), Partial()), (Replicate(), Replicate()), ["all_reduce"]),
    ((Shard(0), Shard(0)), (Replicate(), Replicate()), ["all_gather"]),
    ((Partial(), Partial()), (Shard(0), Shard(0)), ["reduce_scatter"]),
    ((Shard(0), Shard(0)), (Shard(1), Shard(1)), ["all_to_all"]),
    ((Shard(0), Partial()), (Shard(0), Shard(1)), ["reduce_scatter"]),
    ((Shard(0), Shard(1)), (Shard(0), Replicate()), ["all_gather"]),
    ((Replicate(), Replicate()), (Shard(0), Shard(0)), []),
    ((Replicate(), Partial()), (Shard(0), Replicate()), ["all_reduce"]),
]


def spoken(comm: Communicator, shape: Any, mesh_shape: Any, source: Any, target: Any) -> tuple[dict, dict, float]:
    mesh = Mesh(mesh_shape, NAMES[: len(mesh_shape)])
    _, placed = placed_by_hand(full_values(shape), mesh, source)
    uni.reshard(placed, mesh, target)  # makes the groups
    with traffic.counted() as seen:
        uni.reshard(placed, mesh, target)
    return dict(seen.calls), dict(seen.payload), seen.sent


@pytest.mark.parametrize(("source", "target", "op", "payload", "sent"), LINE)
def test_one_collective_at_most(
    pools: Pools, source: Placement, target: Placement, op: str | None, payload: int, sent: int
) -> None:
    for answer in pools("gloo", 4).run(spoken, (8, 8), (4,), [source], [target]):
        assert answer == (({op: 1}, {op: payload}, sent) if op else ({}, {}, 0))


@pytest.mark.parametrize(("source", "target", "op", "payload", "sent"), LINE)
def test_one_collective_also_on_uneven_sizes(
    pools: Pools, source: Placement, target: Placement, op: str | None, payload: int, sent: int
) -> None:
    for calls, _, _ in pools("gloo", 4).run(spoken, (7, 5), (4,), [source], [target]):
        assert calls == ({op: 1} if op else {})


@pytest.mark.parametrize(("source", "target", "ops"), GRID)
def test_axes_share_a_collective(pools: Pools, source: Any, target: Any, ops: list[str]) -> None:
    for calls, _, _ in pools("gloo", 4).run(spoken, (8, 8), (2, 2), source, target):
        assert calls == dict.fromkeys(ops, 1)


def backward_speech(comm: Communicator, source: Any, target: Any) -> dict[str, int]:
    mesh = Mesh((4,), ("a",))
    _, placed = placed_by_hand(full_values((8, 8)), mesh, [source])
    moved = uni.reshard(placed, mesh, [target]).to_local().sum()
    with traffic.counted() as seen:
        moved.backward()
    return dict(seen.calls)


@pytest.mark.parametrize(
    ("source", "target", "ops"),
    [
        (Shard(0), Replicate(), {}),
        (Replicate(), Shard(0), {"all_gather": 1}),
        (Partial(), Replicate(), {}),
        (Partial(), Shard(0), {"all_gather": 1}),
        (Shard(0), Shard(1), {"all_to_all": 1}),
    ],
)
def test_the_backward_is_as_frugal(pools: Pools, source: Placement, target: Placement, ops: dict[str, int]) -> None:
    assert pools("gloo", 4).run(backward_speech, source, target) == [ops] * 4


# ---- random cases ------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, ...]:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh_shape = draw(st.sampled_from([(4,), (2, 2), (1, 4), (2, 1, 2)]))
    kinds = [Replicate(), Partial(), *(Shard(dim) for dim in range(len(shape)))]
    layout = st.tuples(*[st.sampled_from(kinds)] * len(mesh_shape))
    return shape, mesh_shape, draw(layout), draw(layout)


def check_cases(comm: Communicator, batch: list[tuple[Any, ...]]) -> None:
    for shape, mesh_shape, source, target in batch:
        check_pair(shape, Mesh(mesh_shape, NAMES[: len(mesh_shape)]), source, target)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(batch=st.lists(cases(), min_size=1, max_size=6))
def test_random_cases(pools: Pools, batch: list[tuple[Any, ...]]) -> None:
    pools("gloo", 4).run(check_cases, batch)


# ---- the rest ----------------------------------------------------------------------------------------------------


def check_interop(comm: Communicator) -> None:
    mesh = Mesh((2, 2), ("a", "b"))
    full = full_values((6, 5))
    theirs = distribute_tensor(full, mesh.device_mesh, [Shard(0), Replicate()])
    ours = uni.shard_tensor(full, mesh, [Shard(0), Replicate()])
    assert torch.equal(theirs.to_local(), ours.to_local())
    assert theirs.placements == ours.placements
    assert torch.equal(uni.reshard(theirs, mesh, [Replicate(), Shard(-1)]).full_tensor(), full)
    assert torch.equal(ours.redistribute(placements=[Replicate(), Shard(1)]).full_tensor(), full)
    line = mesh.flatten(("a", "b"))
    assert torch.equal(uni.reshard(ours, line, [Shard(1)]).to_local(), local_slice(full, line, [Shard(1)]))
    assert global_shape(ours.to_local(), mesh, [Shard(0), Replicate()]) == (6, 5)

    parameter = torch.nn.Parameter(full.clone())
    placed = uni.shard_tensor(parameter, mesh, [Replicate(), Shard(1)])
    assert isinstance(placed, torch.nn.Parameter)
    assert placed.is_leaf
    assert placed.requires_grad
    uni.reshard(placed, mesh, [Replicate(), Replicate()]).to_local().sum().backward()
    assert torch.equal(placed.grad.to_local(), torch.ones_like(placed.to_local()))
    with torch.no_grad():
        placed.to_local().zero_()
    assert torch.equal(parameter, full), "shard_tensor copies"

    leaf = full.clone().requires_grad_()
    (uni.shard_tensor(leaf * 2, mesh, [Shard(0), Shard(1)]).to_local() ** 2).sum().backward()
    torch.testing.assert_close(leaf.grad, 8 * full)


def check_second_derivative(comm: Communicator) -> None:
    """On DTensors throughout: the way from them to local tensors is differentiable twice from torch 2.13 on only."""
    mesh = Mesh((4,), ("a",))
    full = full_values((6, 5))
    leaf = uni.shard_tensor(full.clone().requires_grad_(), mesh, [Shard(0)])
    moved = uni.reshard(leaf, mesh, [Shard(1)])
    (first,) = torch.autograd.grad((moved**3).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    torch.testing.assert_close(second.full_tensor(), 6 * full)


def check_complaints(comm: Communicator) -> None:
    mesh = Mesh((2, 2), ("a", "b"))
    full = full_values((6, 5))
    for placements, words in [
        ([Shard(0)], "expected a list of 2"),
        ([Shard(2), Replicate()], "expected a dim from -2 to 1"),
        ([Partial("bxor"), Replicate()], "expected one of sum"),
        ([Partial("sum"), Partial("max")], "order would matter"),
        (["x", Replicate()], "expected Shard"),
    ]:
        with pytest.raises(UsageError, match=words):
            uni.reshard(full, mesh, placements)
    with pytest.raises(UsageError, match="use reshard"):
        uni.shard_tensor(uni.shard_tensor(full, mesh, [Shard(0)] * 2), mesh, [Shard(0)] * 2)
    _, placed = placed_by_hand(full, mesh, [Partial("max"), Replicate()])
    with pytest.raises(UsageError, match="detach"):
        uni.reshard(placed, mesh, [Replicate(), Replicate()])
    pair = Mesh((2,), ("a",), [0, 1] if comm.rank < 2 else [2, 3])
    with pytest.raises(UsageError, match="different ranks"):
        uni.reshard(uni.shard_tensor(full, mesh, [Shard(0)] * 2), pair, [Shard(0)])
    with pytest.raises(UsageError, match="local sizes"):
        global_shape(torch.zeros(comm.rank + 1), Mesh((4,), ("a",)), [Shard(0)])
    assert checked([Shard(-1), Replicate()], mesh, 3) == (Shard(2), Replicate())


def test_with_torch(pools: Pools) -> None:
    pools("gloo", 4).run(check_interop)


def test_twice_differentiable(pools: Pools) -> None:
    pools("gloo", 4).run(check_second_derivative)


def test_complaints(pools: Pools) -> None:
    pools("gloo", 4).run(check_complaints)
