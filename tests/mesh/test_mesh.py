"""The grid of ranks, as a description and over running ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import unisono as uni
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import CommError, UsageError
from unisono.mesh.mesh import Mesh

Pools = Callable[[str, int], RankPool]


def test_a_description_needs_no_ranks() -> None:
    mesh = Mesh((16, 8, 8), ("pp", "dp", "tp"))
    assert (mesh.size(), mesh.size("dp"), mesh.size("pp", "tp"), mesh.ndim) == (1024, 8, 128, 3)
    assert mesh.coordinate(777) == (12, 1, 1)
    assert mesh.index("tp", rank=777) == 1
    assert mesh.index("pp", "tp", rank=777) == 12 * 8 + 1
    assert mesh.rank_at(pp=12, dp=1, tp=1) == 777
    assert mesh.along("dp", rank=777) == tuple(768 + 1 + 8 * i for i in range(8))
    assert 1023 in mesh
    assert 1024 not in mesh
    with pytest.raises(CommError, match=r"uni\.init"):
        mesh.comm("tp")


def test_groups_split_the_mesh_into_disjoint_parts() -> None:
    mesh = Mesh((2, 3, 4), ("a", "b", "c"))
    for names in [("a",), ("b",), ("c",), ("a", "c"), ("c", "b"), ("a", "b", "c")]:
        groups = mesh.groups(*names)
        assert sorted(rank for group in groups for rank in group) == list(range(24))
        for group in groups:
            assert all(mesh.along(*names, rank=rank) == group for rank in group)
            assert [mesh.index(*names, rank=rank) for rank in group] == list(range(len(group)))


def test_sub_mesh_and_flatten() -> None:
    mesh = Mesh((2, 3, 4), ("a", "b", "c"))  # this process is rank 0
    assert np.array_equal(mesh["b"].ranks, [0, 4, 8])
    assert np.array_equal(mesh["a", "c"].ranks, [[0, 1, 2, 3], [12, 13, 14, 15]])
    assert np.array_equal(mesh["c", "a"].ranks, np.array([[0, 1, 2, 3], [12, 13, 14, 15]]).T)
    flat = mesh.flatten(("b", "c"))
    assert (flat.names, flat.shape) == (("a", "b_c"), (2, 12))
    assert np.array_equal(flat.ranks, np.arange(24).reshape(2, 12))
    outer = mesh.flatten(("a", "c"), "ac")
    assert (outer.names, outer.shape) == (("ac", "b"), (8, 3))
    assert outer.along("ac", rank=5) == mesh.along("a", "c", rank=5)


def test_equality_is_by_content() -> None:
    assert Mesh((2, 2), ("a", "b")) == Mesh((2, 2), ("a", "b"), [[0, 1], [2, 3]])
    assert Mesh((2, 2), ("a", "b")) != Mesh((2, 2), ("a", "b"), [[0, 2], [1, 3]])
    assert len({Mesh((2,), ("a",)), Mesh((2,), ("a",)), Mesh((2,), ("b",))}) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((2, 2), ("a",)), "one name an axis"),
        (((), ()), "one name an axis"),
        (((2, 0), ("a", "b")), "at least 1"),
        (((2, 1.5), ("a", "b")), "whole numbers"),
        (((2, 2), ("a", "a")), "used twice"),
        (((2, 2), ("a", "b c")), "words such as"),
        (((2, 2), ("a", "b"), [0, 1, 2]), "needs 4 ranks"),
        (((2,), ("a",), [1, 1]), "different ranks"),
        (((2,), ("a",), [1, 0]), "do not rise"),
    ],
)
def test_bad_meshes(arguments: tuple, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Mesh(*arguments)


def test_bad_questions() -> None:
    mesh = Mesh((2, 2), ("dp", "tp"))
    with pytest.raises(UsageError, match="no axis 'pp'; its axes are dp, tp"):
        mesh.size("pp")
    with pytest.raises(UsageError, match="rank 9 is not in"):
        mesh.coordinate(9)
    with pytest.raises(UsageError, match="off the mesh"):
        mesh.rank_at(dp=2, tp=0)
    with pytest.raises(UsageError, match="named twice"):
        mesh.along("dp", "dp")


def every_axis_communicates(comm: Communicator) -> None:
    mesh = Mesh((2, 2, 2), ("dp", "pp", "tp")).connect()
    assert mesh.comm() is comm
    assert mesh.comm("tp") is Mesh((4, 2), ("x", "tp")).comm("tp"), "equal groups are shared"
    for names in [("dp",), ("pp",), ("tp",), ("dp", "tp"), ("dp", "pp"), ("dp", "pp", "tp")]:
        group = mesh.comm(*names)
        assert group.ranks == mesh.along(*names)
        assert group.rank == mesh.index(*names)
        total = torch.tensor([float(comm.rank)])
        group.all_reduce(total)
        assert total.item() == sum(mesh.along(*names))
    sub = mesh["dp", "tp"]
    assert sub.size() == 4
    assert sub.comm("tp") is mesh.comm("tp")
    assert comm.rank in sub


def torch_sees_the_same_groups(comm: Communicator) -> None:
    mesh = Mesh((2, 4), ("dp", "tp"))
    device_mesh = mesh.device_mesh
    assert isinstance(device_mesh, DeviceMesh)
    assert device_mesh.get_group("tp") is mesh.comm("tp").group
    assert mesh.device_mesh is device_mesh
    assert device_mesh["tp"] == mesh["tp"].device_mesh
    assert mesh["tp"].device_mesh.get_group() is mesh.comm("tp").group
    assert Mesh.of(device_mesh) == mesh
    flat = mesh.flatten(("dp", "tp"))
    assert flat.device_mesh.size() == 8


def wrong_size(comm: Communicator) -> list[str]:
    messages = []
    for shape in [(3, 2), (3, 5)]:
        with pytest.raises(UsageError) as caught:
            Mesh(shape, ("dp", "tp"))
        messages.append(str(caught.value))
    assert Mesh.describe((64, 16), ("dp", "tp")).size() == 1024
    with pytest.raises(UsageError, match="only 8 ranks are running"):
        Mesh.describe((64, 16), ("dp", "tp")).comm("tp")
    return messages


def some_ranks_only(comm: Communicator) -> float:
    half = comm.rank // 4
    mesh = Mesh((2, 2), ("dp", "tp"), [[0, 1], [2, 3]] if half == 0 else [4, 6, 5, 7])
    total = torch.tensor([float(comm.rank)])
    mesh.comm("tp").all_reduce(total)
    return total.item()


def test_over_eight_ranks(pools: Pools) -> None:
    pool = pools("gloo", 8)
    pool.run(every_axis_communicates)
    pool.run(torch_sees_the_same_groups)
    fits, fits_not = pool.run(wrong_size)[0]
    assert fits == (
        "mesh dp=3,tp=2 needs 6 ranks, but 8 are running; use dp=4, or start 6, "
        "or pass ranks= for a mesh over some of them"
    )
    assert "start 15" in fits_not
    assert pool.run(some_ranks_only) == [1, 1, 5, 5, 10, 12, 10, 12]


def test_a_world_of_one() -> None:
    uni.init("gloo")
    try:
        mesh = uni.Mesh((1, 1), ("dp", "tp"))
        placed = uni.shard_tensor(torch.arange(6.0), mesh, [uni.Shard(0), uni.Partial()])
        back = uni.reshard(placed, mesh, [uni.Replicate(), uni.Replicate()])
        assert torch.equal(back.to_local(), torch.arange(6.0))
    finally:
        uni.shutdown()
    with pytest.raises(CommError):
        mesh.comm("dp")
