"""Reductions of which MPI carries the parts and torch computes the whole, where they lie: on GPUs.

An MPI that takes GPU memory moves it from GPU to GPU, but computes on the host. So it moves the parts, and each rank
folds them, all in the order of ranks: every rank gets the same bits. Imports mpi4py: import it late.
"""

from __future__ import annotations

import torch
from mpi4py import MPI

from unisono.comm.mpi_buffer import cuda_aware

_FEW = 4  # ranks up to which everybody may get everybody's numbers; a reduction in MPI moves each of them twice at most
_ROOM = 2**30  # bytes that may lie beside the tensors
_everywhere = False


def agree(world: MPI.Intracomm) -> None:
    """Learn whether every rank's MPI takes GPU memory. All ranks must fold, or none: they make other calls then."""
    global _everywhere
    here = torch.version.cuda is not None and cuda_aware()
    _everywhere = bool(world.allreduce(int(here), MPI.MIN))


def pays(wire: torch.Tensor, ranks: int) -> bool:
    """Whether to fold what `ranks` ranks have of this. The same on all, where all have it on a GPU or none has."""
    return _everywhere and wire.is_cuda and ranks <= _FEW and ranks * wire.nbytes <= _ROOM
