"""Parameters that several ranks of a pipeline hold: an embedding on the first stage, tied to the head on the last.

Each of those ranks has a copy, or under ZeRO the same shard of it, and computes a part of the gradient. The parts are
summed before the optimizer runs, so that the copies, equal at first, stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from unisono.comm.communicator import Communicator


@dataclass(frozen=True)
class Tied:
    name: str  # of the parameter, in the full model
    ranks: tuple[int, ...]  # of the pipeline: those that hold it


class TiedGradients:
    """Sums the gradients of tied parameters. All ranks of the pipeline make one, each with its own `tied`."""

    def __init__(self, tied: Sequence[Tied], comm: Communicator) -> None:
        self._tied = tuple(tied)
        self._rank = comm.rank
        # In one order on all ranks: a group is made when all its members have come to it.
        self._comms = {
            ranks: comm if len(ranks) == comm.size else comm.subgroup(ranks)
            for ranks in sorted({each.ranks for each in self._tied})
        }

    @property
    def names(self) -> frozenset[str]:
        return frozenset(each.name for each in self._tied)

    @property
    def elsewhere(self) -> frozenset[str]:
        """The names of the parameters here that another rank accounts for: leave them out of norms and counts."""
        return frozenset(each.name for each in self._tied if each.ranks[0] != self._rank)

    def sum(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Make the gradients those of the full pipeline, on every rank that holds them.

        `parameters`, by name, are what is to be optimized, after the replicas' gradients are summed.
        """
        handles = []
        for each in self._tied:
            parameter = parameters.get(each.name)
            if parameter is None or not parameter.requires_grad or not parameter.numel():
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            handles.append(self._comms[each.ranks].all_reduce(parameter.grad, async_op=True))
        for handle in handles:
            handle.wait()
