"""An Option: one way to run one op on one axis of a mesh.

It has the placements of the op's tensor inputs and outputs on that axis. Rules (see `rules`) list an op's options
without knowing how long the axis is; on a mesh of several axes an op takes one option an axis, and whoever combines
them checks that every sharded dim divides.

Gradients follow from the option alone:

    the gradient of           is placed as
    Shard(d)                  Shard(d)
    Partial                   Replicate
    Replicate, as an input    Partial(sum) where the op is split on the axis (something else of it is not Replicate)
                              Replicate where it is not
    Replicate, as an output   Replicate
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard

from unisono.mesh.placement import Placement, Placements

REPLICATE = Replicate()
SUM = Partial("sum")


@dataclass(frozen=True)
class Option:
    """Placements of an op's tensor inputs (in the order of its flattened arguments) and of its outputs, on one axis.

    local: where the op on local shards is not simply the same op, the name of what runs instead (see `rewrites`).
    """

    inputs: Placements
    outputs: Placements
    local: str | None = None

    @property
    def splits(self) -> bool:
        """Whether ranks along the axis do different work."""
        return any(placement != REPLICATE for placement in (*self.inputs, *self.outputs))

    def gradient(self, i: int) -> Placement:
        """The placement of the gradient that the op gives for its i-th tensor input."""
        placement = self.inputs[i]
        if isinstance(placement, Shard):
            return placement
        return SUM if placement == REPLICATE and self.splits else REPLICATE


def output_gradient(placement: Placement) -> Placement:
    """How the gradient of a tensor that is placed so must reach the op that made it."""
    return placement if isinstance(placement, Shard) else REPLICATE


def full(inputs: int, outputs: int) -> Option:
    """Every rank does all of it."""
    return Option((REPLICATE,) * inputs, (REPLICATE,) * outputs)
