"""Do all ranks have the same data? Each takes its part of every batch, so all must be given one and the same.

A script that draws its data without a seed, or splits it by rank, would train on parts that do not belong together.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError

_LOOKS = 2  # at the first batches of a loop: a habit shows at once, and a check of every step would cost time


class SameBatch:
    """Compares the first batches that the ranks of a group are given."""

    def __init__(self, comm: Communicator, refusal: str | None = None) -> None:
        """refusal: the error's text, with {rank} and {first} for the ranks that differ."""
        self._comm = comm
        self._refusal = refusal or _GIVEN
        self._left = 0 if comm.size == 1 or comm.is_simulated else _LOOKS

    def require(self, batch: Any) -> None:
        """UsageError on every rank where one was given another batch; every rank calls it."""
        if self._left:
            self._left -= 1
            require_same_batch(batch, self._comm, self._refusal)


_READ = (
    "the first batch that rank {rank} reads is not the one that rank 0 reads; expected one dataset on every rank, of "
    "which unisono gives each its part: seed what is drawn to make it (torch.manual_seed), and do not shard it by rank"
)
_GIVEN = (
    "rank {rank} was given another batch than rank {first}; expected the same global batch on every rank, of which "
    'each takes its part: seed what draws it, or use batch="local" where every data rank brings its own samples (and '
    "the ranks that share them, along tp, cp and pp, the same ones)"
)


def require_same_batch(batch: Any, comm: Communicator, refusal: str = _READ) -> None:
    """UsageError on every rank where one has another batch; every rank calls it."""
    everyone = comm.all_gather_object(_digest(batch), only_data=True)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise UsageError(refusal.format(rank=comm.ranks[rank], first=comm.ranks[0]))


def _digest(batch: Any) -> str:
    found = hashlib.blake2b(digest_size=16)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, int | float | str | bytes):
            found.update(repr(leaf).encode())
    return found.hexdigest()
