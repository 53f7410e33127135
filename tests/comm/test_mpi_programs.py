"""The MPI backend under real mpiexec: one launch a program and MPI library, many checks a launch."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache

import pytest

from tests.comm.mpiexec import MPIS, PROGRAMS, run_under


def checks_in(program: str) -> list[str]:
    tree = ast.parse((PROGRAMS / program).read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]


SIZES = {"mpich": (2, 4), "openmpi": (2,)}  # ranks


@cache
def outcome(mpi: str, ranks: int, program: str) -> tuple[set[str], str]:
    done = run_under(mpi, ranks, program)
    passed = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("PASSED")}
    return passed, f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-8000:]}"


def launches() -> list[tuple[str, int, str]]:
    programs = ("collectives.py", "works.py", "stack.py")
    return [(mpi, ranks, program) for ranks in (2, 4) for mpi in MPIS if ranks in SIZES[mpi] for program in programs]


def marks(mpi: str, ranks: int, program: str) -> Sequence[pytest.MarkDecorator]:
    """Four ranks of MPI busy-wait in turns on two cores. Collectives of four are in test_communicator.py, too. What
    torch builds on collectives needs no other calls of one library than of the other."""
    is_further = (ranks == 4 and program != "works.py") or (mpi, program) == ("openmpi", "stack.py")
    return [pytest.mark.thorough] if is_further else []


@pytest.mark.parametrize(
    ("mpi", "ranks", "program", "check"),
    [pytest.param(*launch, check, marks=marks(*launch)) for launch in launches() for check in checks_in(launch[2])],
)
def test_check(mpi: str, ranks: int, program: str, check: str) -> None:
    passed, story = outcome(mpi, ranks, program)
    assert check in passed, f"{program} on {ranks} ranks of {mpi} did not pass {check}\n{story}"


@pytest.mark.parametrize(
    ("mpi", "ranks", "program"), [pytest.param(*launch, marks=marks(*launch)) for launch in launches()]
)
def test_ends_well(mpi: str, ranks: int, program: str) -> None:
    _, story = outcome(mpi, ranks, program)
    assert story.startswith("exit code 0\n"), story
