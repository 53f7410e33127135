"""Ranks that all tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ranks import RankPool

os.environ.setdefault("OMP_NUM_THREADS", "1")
MPIEXEC = Path(sys.prefix) / "bin" / "mpiexec"


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[str, int], RankPool]]:
    """pools(backend, size): a pool of ranks, started at first use and kept."""
    started: dict[tuple[str, int], RankPool] = {}

    def get(backend: str, size: int) -> RankPool:
        if (backend, size) not in started or started[backend, size].closed:
            command = None
            if backend == "mpi":
                if not MPIEXEC.exists():
                    pytest.skip(f"no mpiexec at {MPIEXEC}; run make setup")
                command = [str(MPIEXEC), "-n", str(size)]
            started[backend, size] = RankPool(size, backend, command)
        return started[backend, size]

    yield get
    for pool in started.values():
        pool.close()


@pytest.fixture(params=["gloo", "mpi"])
def ranks4(request: pytest.FixtureRequest, pools: Callable[[str, int], RankPool]) -> RankPool:
    """Four ranks, on each CPU backend in turn."""
    return pools(request.param, 4)
