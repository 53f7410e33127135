"""How the MPI backend starts, refuses to start, and ends."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.comm.mpiexec import MPIS, ROOT, run_under
from tests.processes import run_forked
from unisono.comm.mpi import library
from unisono.errors import MissingPackageError

GIB = 1024**3


def run_alone(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_registers_once_and_may_be_asked_again() -> None:
    library.register()
    plugin = dist.Backend._plugins["MPI4PY"]
    library.register()
    assert dist.Backend._plugins["MPI4PY"] is plugin
    assert dist.Backend.backend_capability["mpi4py"] == ["cpu", "cuda"]


def test_missing_mpi4py_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(MissingPackageError, match=r"the MPI backend needs .*'mpi4py'.*unisono\[mpi\]"):
        library.load()


def test_registering_does_not_import_mpi4py() -> None:
    done = run_alone("""
import sys
from unisono.comm.mpi import library
library.register()
assert 'mpi4py' not in sys.modules
""")
    assert done.returncode == 0, done.stderr


def test_the_package_mpich_is_found_where_mpi4py_does_not_look() -> None:
    """As with Debian's own Python, whose prefix is /usr and whose wheels' libraries lie in /usr/local/lib."""
    try:
        metadata.distribution("mpich")
    except metadata.PackageNotFoundError:
        pytest.skip("MPI is the site's own here, not the package mpich")
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    if sys.prefix == sys.base_prefix or not base.exists():
        pytest.skip("not in a virtual environment")
    path = os.pathsep.join([str(ROOT / "src"), sysconfig.get_path("platlib"), sysconfig.get_path("purelib")])
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MPI4PY_")}
    program = "from unisono.comm.mpi import library; print(library.load().Get_version())"
    done = subprocess.run(
        [str(base), "-c", program], env=environment | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def alone() -> None:
    library.register()
    assert library.world() == (0, 1)
    dist.init_process_group(library.BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    x = torch.arange(3.0)
    dist.all_reduce(x)
    out = torch.empty(3)
    dist.all_gather_into_tensor(out, x)
    assert out.tolist() == [0.0, 1.0, 2.0]
    dist.destroy_process_group()
    dist.init_process_group(library.BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    dist.barrier()


def two_without_mpiexec() -> None:
    library.register()
    dist.init_process_group(library.BACKEND, store=dist.HashStore(), rank=1, world_size=2)


def test_without_mpiexec_the_world_has_one_rank_and_no_other_is_joined(tmp_path: Path) -> None:
    well, refused = run_forked([alone, two_without_mpiexec], tmp_path)
    assert well.code == 0, well.output
    assert refused.code != 0
    assert "rank 1 of 2 was asked for, but for MPI this is rank 0 of 1" in refused.output
    assert "start it with mpiexec -n 2" in refused.output


@pytest.mark.parametrize("mpi_name", MPIS)
def test_a_rank_that_raises_ends_the_job(mpi_name: str) -> None:
    done = run_under(mpi_name, 2, "failing.py")
    assert done.returncode != 0
    assert "ValueError: rank 0 has had enough" in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("check", ["broadcast", "all_gather", "all_reduce", "point_to_point"])
def test_more_than_two_to_the_31_elements(check: str) -> None:
    free = _available_memory()
    if free < 12 * GIB:
        reason = f"needs 12 GiB of free memory, and {free / GIB:.1f} GiB are free"
        print(reason)
        pytest.skip(reason)
    done = run_under("mpich", 2, "large.py", f"check_{check}")
    assert done.stdout.count("PASSED") == 1, done.stderr[-4000:]


def _available_memory() -> int:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024
