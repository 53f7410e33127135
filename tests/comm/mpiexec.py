"""Runs a program of tests/comm/mpi_programs under a real mpiexec."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "mpi_programs"
MPIS = ("mpich", "openmpi")


def run_under(
    mpi: str, n: int, script: str | Path, *args: str, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Start `n` ranks of a script (a name in mpi_programs, or a path) and wait for them.

    Skips the test, saying why, where that MPI is not installed.
    """
    path = PROGRAMS / script  # an absolute script stands for itself
    command = [*_mpiexec(mpi), "-n", str(n), sys.executable, str(path), *args]
    with tempfile.TemporaryDirectory() as folder:
        environment = _environment(mpi) | {"TEST_STORE": f"{folder}/store", "TEST_FOLDER": folder}
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
        )


@cache
def _mpiexec(mpi: str) -> Sequence[str]:
    prefix = Path(sys.prefix) / "openmpi" if mpi == "openmpi" else Path(sys.prefix)
    program = prefix / "bin" / "mpiexec"
    if not program.exists():
        reason = f"{mpi} is not installed: there is no {program}"
        print(reason)
        pytest.skip(reason)
    return [
        str(program),
        *(("--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE") if mpi == "openmpi" else ()),
    ]


def _environment(mpi: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MPI4PY_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment["OMP_NUM_THREADS"] = "1"
    if mpi == "openmpi":
        environment["MPI4PY_MPIABI"] = "openmpi"
        environment["MPI4PY_LIBMPI"] = str(Path(sys.prefix) / "openmpi" / "lib" / "libmpi.so.40")
    return environment
