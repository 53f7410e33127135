"""One rank raises while the others wait for it inside MPI, where no signal of Python's reaches them."""

from __future__ import annotations

import torch.distributed as dist

from tests.comm.mpi_programs import harness

harness.join()
if dist.get_rank() == 0:
    raise ValueError("rank 0 has had enough")
dist.barrier()
