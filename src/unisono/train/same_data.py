"""Whether all ranks read the same data: each takes its part of every batch, so all must see one and the same dataset.

A script that draws its data without a seed, or cuts it by rank, would train on pieces that do not belong together.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError


def require_same_batch(batch: Any, comm: Communicator) -> None:
    """UsageError on every rank where one has read another batch; every rank calls it."""
    everyone = comm.all_gather_object(_digest(batch))
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise UsageError(
                f"the first batch that rank {rank} reads is not the one that rank 0 reads; expected one dataset on "
                "every rank, of which unisono gives each its part: seed what is drawn to make it (torch.manual_seed), "
                "and do not cut it by rank"
            )


def _digest(batch: Any) -> str:
    found = hashlib.blake2b(digest_size=16)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, int | float | str | bytes):
            found.update(repr(leaf).encode())
    return found.hexdigest()
