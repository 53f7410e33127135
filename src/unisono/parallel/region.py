"""A tensor-parallel region: the stretch of a model in which every rank has its own part of the features.

It begins with layers cut by columns and ends with a layer cut by rows. Outside, activations are the same on all ranks
(or, under sequence parallelism, cut along the sequence: see `sequence`); a Region knows how they come in and go out.
It also tells the random numbers where the forward pass is: a dropout inside draws this rank's part of the features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh import dropout
from unisono.mesh.region import Part
from unisono.parallel import conjugates
from unisono.parallel.layout import Split
from unisono.parallel.tensor_pieces import TP

_ENTERED = "unisono_entered"
_STANDS_FOR = "unisono_stands_for"


class Region:
    """Activations outside are whole on every rank."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.is_inside = False  # whether the forward pass is between a column and a row layer

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """What a layer cut by columns works on.

        Layers that share an input (queries, keys and values; gate and up) share this too, so that it is paid for once:
        the input carries it along.
        """
        stood_for = getattr(x, _STANDS_FOR, None)
        if stood_for is not None:
            return stood_for
        if x.is_inference():
            return self._entered(x)
        now = (self, x._version, torch.is_grad_enabled())
        before, entered = getattr(x, _ENTERED, (None, None))
        if entered is None or before != now:
            entered = self._entered(x)
            setattr(x, _ENTERED, (now, entered))
        return entered

    def leave(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, where a layer cut by rows ends the region."""
        self.locate_outside()
        return conjugates.reduce(part, self.comm)

    def locate_inside(self, totals: Sequence[int]) -> None:
        """Dropouts from here on are inside; `totals` are how many features a tensor there has on all ranks together."""
        self.is_inside = True
        state = dropout.active()
        if state is not None:
            state.locate = partial(self._inside, totals)

    def locate_outside(self) -> None:
        """Dropouts from here on are outside."""
        self.is_inside = False
        state = dropout.active()
        if state is not None:
            state.locate = None

    def _inside(
        self, totals: Sequence[int], shape: Sequence[int], kind: str, parts: dict[int, Part]
    ) -> dict[int, Part]:
        rank, ranks = self.comm.rank, self.comm.size
        if len(shape) == 4:  # what queries make of keys: (batch, heads, queries, keys)
            heads = parts[1].total if 1 in parts else shape[1]
            mine = Part(range(heads * rank, heads * (rank + 1)), heads * ranks)
            return parts | {1: parts[1].within(mine) if 1 in parts else mine}
        for total in totals:
            held = Split.even(TP, 0, total, ranks).held[rank]
            if len(held) == shape[-1]:
                assert isinstance(held, range)
                return parts | {len(shape) - 1: Part(held, total)}
        raise UsageError(
            f"a dropout inside a tensor-parallel region works on a tensor of shape {tuple(shape)}; expected attention "
            f"weights (batch, heads, queries, keys), or this rank's piece of {' or '.join(map(str, totals))} features"
        )

    def _entered(self, x: torch.Tensor) -> torch.Tensor:
        return conjugates.copy(x, self.comm)

    def enter_tokens(self, value: Any) -> Any:
        """As `enter`, for arguments whose first dim are tokens: of experts. Other arguments stay as they are."""
        return self.enter(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def leave_tokens(self, part: torch.Tensor) -> torch.Tensor:
        return self.leave(part)

    def stand_in(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor that a module may ask for its shape, and pass on to layers cut by columns, in the place of x.

        It is as wide as this rank's part of the features. Used in any other way it shows: it is full of nan.
        """
        entered = self.enter(x)
        nan = torch.full((), torch.nan, dtype=entered.dtype, device=entered.device)
        stand_in = nan.expand(*entered.shape[:-1], entered.shape[-1] // self.comm.size)
        setattr(stand_in, _STANDS_FOR, entered)
        return stand_in
