"""The MPI backend under real mpiexec: one launch a program and MPI library, many checks a launch."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.comm.mpiexec import MPIS, PROGRAMS, run_under


def checks_in(program: str) -> list[str]:
    tree = ast.parse((PROGRAMS / program).read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]


@cache
def outcome(mpi: str, program: str) -> tuple[set[str], str]:
    done = run_under(mpi, 4 if mpi == "mpich" else 2, program)
    passed = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("PASSED")}
    return passed, f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-8000:]}"


def cases() -> list[tuple[str, str, str]]:
    programs = ("collectives.py", "works.py", "stack.py")
    return [(mpi, program, check) for mpi in MPIS for program in programs for check in checks_in(program)]


@pytest.mark.parametrize(("mpi", "program", "check"), cases())
def test_check(mpi: str, program: str, check: str) -> None:
    passed, story = outcome(mpi, program)
    assert check in passed, f"{program} under {mpi} did not pass {check}\n{story}"


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("program", ["collectives.py", "works.py", "stack.py"])
def test_ends_well(mpi: str, program: str) -> None:
    _, story = outcome(mpi, program)
    assert story.startswith("exit code 0\n"), story
