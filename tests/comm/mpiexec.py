"""Runs a program of tests/comm/mpi_programs under a real mpiexec."""

from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import pytest

from tests import mpi_ranks
from tests.ranks import import_what_ranks_need

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "mpi_programs"
MPIS = ("mpich", "openmpi")


def run_under(mpi: str, n: int, script: str, *words: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Start `n` ranks of a script of mpi_programs with these arguments and wait for them. They are forked from here
    instead of importing torch each.

    Skips the test, saying why, where that MPI is not installed.
    """
    mpiexec = _mpiexec(mpi)
    import_what_ranks_need()
    with tempfile.TemporaryDirectory() as folder:
        job = partial(
            _as_main, [str(PROGRAMS / script), *words], {"TEST_STORE": f"{folder}/store", "TEST_FOLDER": folder}
        )
        return mpi_ranks.run(n, job, timeout, mpiexec, env=_environment(mpi), cwd=ROOT)


def run_anew_under(mpi: str, n: int, script: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """The same in interpreters of their own: a process that has asked for GPUs must not fork those that use them."""
    command = [*_mpiexec(mpi), "-n", str(n), sys.executable, str(PROGRAMS / script)]
    with tempfile.TemporaryDirectory() as folder:
        environment = _environment(mpi) | {"TEST_STORE": f"{folder}/store", "TEST_FOLDER": folder}
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
        )


def _as_main(words: list[str], variables: dict[str, str]) -> None:
    os.environ.update(variables)
    if "MPI4PY_LIBMPI" in os.environ:  # which Open MPI's mpiexec tells a program that it starts by LD_LIBRARY_PATH
        ctypes.CDLL(os.environ["MPI4PY_LIBMPI"], ctypes.RTLD_GLOBAL)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


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
