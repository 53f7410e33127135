"""A rank that is alone for a while: nothing that it can ask tells of the job, and afterwards all is as before."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import get_world_size as asked_by_name

import unisono as uni
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous.solo import alone

VARIABLES = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "1"}


def seen_alone(comm: Communicator) -> tuple[dict[str, Any], dict[str, Any]]:
    os.environ.update(VARIABLES)
    try:
        with alone(), alone():
            inside = _seen() | {"sum": _sum().tolist(), "gathered": [each.tolist() for each in _gathered()]}
        outside = _seen() | {"sum": _sum().tolist()}
        comm.barrier()
        return inside, outside
    finally:
        for name in VARIABLES:
            os.environ.pop(name, None)


def _seen() -> dict[str, Any]:
    return {
        "torch": (dist.get_rank(), dist.get_world_size(), asked_by_name(), dist.get_world_size(dist.group.WORLD)),
        "is_initialized": dist.is_initialized(),
        "unisono": (uni.rank(), uni.world_size(), uni.is_initialized()),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _sum() -> torch.Tensor:
    value = torch.ones(2)
    dist.all_reduce(value)
    return value


def _gathered() -> list[torch.Tensor]:
    parts = [torch.zeros(2) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, torch.ones(2))
    return parts


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_rank_alone(pools: Callable[[str, int], RankPool], backend: str) -> None:
    for rank, (inside, outside) in enumerate(pools(backend, 2).run(seen_alone)):
        assert inside == {
            "torch": (0, 1, 1, 1),
            "is_initialized": False,
            "unisono": (0, 1, False),
            "variables": {},
            "sum": [1.0, 1.0],
            "gathered": [[1.0, 1.0]],
        }
        assert outside == {
            "torch": (rank, 2, 2, 2),
            "is_initialized": True,
            "unisono": (rank, 2, True),
            "variables": VARIABLES,
            "sum": [2.0, 2.0],
        }


def raises_alone(comm: Communicator) -> int:
    with pytest.raises(RuntimeError, match="user code"), alone():
        raise RuntimeError("user code")
    return int(comm.all_reduce(torch.tensor(1)))


def test_an_error_leaves_the_rank_in_its_world(pools: Callable[[str, int], RankPool]) -> None:
    assert pools("gloo", 2).run(raises_alone) == [2, 2]


def test_alone_where_no_world_was_joined() -> None:
    with alone():
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="has not been initialized"):
        dist.get_world_size()
