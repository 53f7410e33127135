"""A communicator whose other ranks are not there: each of them is taken to have what this one has.

Messages take no time, but for one copy where something must come: what is computed from it is then numbers, not what
memory held before. Small sums, by which programs decide what to do next, are those of ranks that are all alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from unisono.comm.communicator import Communicator
from unisono.comm.operation import Outcome
from unisono.comm.reduction import Factor

_FEW = 1024  # elements, up to which a sum is one


class SimulatedCommunicator(Communicator):
    """One rank of a world whose others are not there."""

    is_simulated = True

    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", *, factor: Factor | None = None, async_op: bool = False
    ) -> Outcome:
        def start() -> list[dist.Work]:
            if op == "sum" and tensor.numel() <= _FEW:
                tensor.detach().mul_(self.size)
            return []

        return self._run("all_reduce", tensor, start, lambda: tensor, async_op)

    def all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False) -> Outcome:
        self._require_room(out, tensor)

        def start() -> list[dist.Work]:
            out.detach().view(self.size, -1).copy_(tensor.detach().reshape(1, -1))
            return []

        return self._run("all_gather_into", tensor, start, lambda: out, async_op)

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        sizes: Sequence[int] | None = None,
        factor: Factor | None = None,
        out: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> Outcome:
        parts = self._parts("reduce_scatter", tensor, sizes)
        room = self._room("reduce_scatter", out, tensor, parts[self.rank])

        def start() -> list[dist.Work]:
            room.copy_(tensor.detach().split(parts)[self.rank])
            return []

        return self._run("reduce_scatter", tensor, start, lambda: room, async_op)
