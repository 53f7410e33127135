"""The samples of a batch that this rank trains on.

Ranks give a trainer the same global batch, or each the `Share` of it that a Loader has read, or (batch="local") each
data rank its own samples. All three become this rank's Share of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unisono.comm.same_data import SameBatch
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.parallel.layout import Split
from unisono.parallel.share import BatchDim, Share, batch_size_of, first_batch_size, share
from unisono.plan.plan import DATA, Plan


class OwnShare:
    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._same_batch = SameBatch(mesh.comm())
        self._same_share = SameBatch(mesh.comm(*(axis for axis in mesh.names if axis not in DATA)))

    @property
    def part(self) -> tuple[int, int]:
        """Which part of a batch this rank takes, of how many: see `share`."""
        return self._mesh.index(*DATA), self._mesh.size(*DATA)

    def of(self, batch: tuple[Any, Any] | Share, dim: BatchDim, is_local: bool) -> Share:
        """This rank's share. One that holds all samples is the full batch, whoever read it."""
        if not isinstance(batch, Share):
            if is_local:
                return self._of_local(batch, dim)
            self._same_batch.require(batch)
            return share(batch, *self.part, dim)
        self._same_share.require(batch.batch)
        if len(batch.positions) == batch.of:
            return share(batch.batch, *self.part, dim)
        index, count = self.part
        due = Split.even((), 0, batch.of, count).held[index]
        if batch.positions != due:
            raise UsageError(
                f"a share that holds samples {_shown(batch.positions)} of {batch.of}, but this rank's part {self.part} "
                f"is {_shown(due)}; make the loader with Loader(..., part=trainer.part)"
            )
        return batch

    def _of_local(self, batch: tuple[Any, Any], dim: BatchDim) -> Share:
        """The global batch is the local batches of the data ranks, one after the other."""
        self._same_share.require(batch)
        comm = self._mesh.comm(*DATA)
        mine = torch.tensor([batch_size_of(batch, dim)], device=comm.device)
        counts = [int(count) for count in comm.all_gather(mine)] if comm.size > 1 else [int(mine)]
        before = sum(counts[: comm.rank])
        return Share(batch, range(before, before + counts[comm.rank]), sum(counts))

    def require_batch_size(self, mine: Share, dim: BatchDim, plan: Plan) -> None:
        batch_size = first_batch_size(mine.batch, dim)
        if batch_size != len(mine.positions):
            raise UsageError(
                f"a share of {batch_size} samples that declares {len(mine.positions)} of {mine.of}; "
                "shard batches with unisono.parallel.share.share, or give the full batch"
            )
        ranks = self.part[1]
        if plan.pp > 1 and mine.of < ranks * plan.microbatches:
            raise UsageError(
                f"a batch of {mine.of} samples for {ranks} data ranks x {plan.microbatches} microbatches of a "
                f"pipeline; expected at least {ranks * plan.microbatches}: use fewer microbatches"
            )


def _shown(samples: Sequence[int]) -> str:
    return f"{samples[0]} to {samples[-1]}" if samples else "none"
