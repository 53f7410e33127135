"""The MPI backend on GPU tensors: staged through pinned memory, or passed on to an MPI that takes them."""

from __future__ import annotations

import pytest
import torch

from tests.comm.mpiexec import MPIS, run_anew_under
from tests.comm.test_mpi_programs import checks_in


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible here")
@pytest.mark.parametrize("mpi", MPIS)
def test_gpu_tensors(mpi: str) -> None:
    done = run_anew_under(mpi, 2, "gpu.py")
    passed = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("PASSED")}
    assert passed == set(checks_in("gpu.py")), done.stderr[-8000:]
