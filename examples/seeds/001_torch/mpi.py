"""The same program over MPI, with PyTorch as it comes from the package index.

Document 001, "MPI后端".

mpiexec -n 4 python examples/seeds/001_torch/mpi.py

The document builds PyTorch from source for this; unisono registers a backend of its own that stands on mpi4py, with
any MPI (MPICH, Open MPI, the cluster's). mpiexec numbers the ranks, and `uni.init()` asks it. Printed by each rank:
the backend, and the sum over all ranks, from unisono and from plain torch.distributed calls.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import unisono as uni


def main() -> None:
    comm = uni.init()
    mine, torchs = torch.full((2,), float(comm.rank)), torch.full((2,), float(comm.rank))
    comm.all_reduce(mine)
    dist.all_reduce(torchs)
    print(f"rank {comm.rank} of {comm.size} over {comm.backend}: {mine.tolist()} and {torchs.tolist()}")
    assert comm.backend == "mpi"
    assert mine.tolist() == torchs.tolist() == [comm.size * (comm.size - 1) / 2] * 2
    uni.shutdown()


if __name__ == "__main__":
    main()
