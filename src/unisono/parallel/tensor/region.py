"""A tensor-parallel region: the stretch of a model in which every rank has its own part of the features.

It begins with layers sharded by columns and ends with a layer sharded by rows. Outside, activations are the same on all
ranks (or, under sequence parallelism, sharded along the sequence: see `sequence`); a Region knows how they come in and
go out. It also gives the random state where the forward pass is: a dropout inside draws this rank's part of the
features.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh import autograd_collectives
from unisono.mesh.collective_ops import eager_only
from unisono.mesh.global_index import Part
from unisono.mesh.random.active import active_state
from unisono.mesh.random.state import Key, Locate
from unisono.parallel.compile import collectives as markers
from unisono.parallel.layout import Split
from unisono.parallel.tensor.parameter_shards import TP

_ENTERED = "unisono_entered"
_STANDS_FOR = "unisono_stands_for"
_ANSWERS = "unisono_just_entered"


class Region:
    """Activations outside are full on every rank."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.number = markers.register(self)  # in compiled graphs
        self.lengths: list[int] = []  # of all ranks' shards of the sequence, in a block under sp
        self.is_inside = False  # whether the forward pass is between a column and a row layer
        self._last_entered: Callable[[], torch.Tensor | None] = lambda: None  # since the region was left
        # Of each call for random numbers inside: the dim that ranks share and its size, or None where they share none
        self._sharded_dims: dict[Key, tuple[int, int] | None] = {}

    @property
    def outside(self) -> Locate | None:
        """Gives the random state where a dropout outside of the region is."""
        return None

    def enter(self, x: torch.Tensor, width: int | None = None) -> torch.Tensor:
        """What a layer sharded by columns works on, of that width if it is not x's.

        Layers that share an input (queries, keys and values; gate and up) share this too, so that it is paid for once:
        the input carries it along.
        """
        if torch.compiler.is_compiling():
            return markers.enter(x, self.number, x.shape[-1] if width is None else width, self.lengths)
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
            self._last_entered = weakref.ref(entered)
        return entered

    def has_just_entered(self, x: torch.Tensor, layer: object) -> bool:
        """Whether this passage through the region, not an earlier one (in another block, of an input that several
        blocks share), has made x: autograd then sums x's gradient as soon as it is done with this passage.

        A layer that asks again, as in a recomputation, gets the answer of the first time.
        """
        answers: dict[int, bool] = x.__dict__.setdefault(_ANSWERS, {})
        return answers.setdefault(id(layer), self._last_entered() is x)

    def leave(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, where a layer sharded by rows ends the region."""
        if torch.compiler.is_compiling():
            return markers.leave(part, self.number, self.lengths)
        self._last_entered = lambda: None
        self.locate_outside()
        return self._left(part)

    def _left(self, part: torch.Tensor) -> torch.Tensor:
        return autograd_collectives.reduce(part, self.comm)

    def traced(self, x: torch.Tensor, name: str, dim: int = 0, lengths: Sequence[int] = ()) -> torch.Tensor:
        """In a graph that is compiled: a collective of autograd_collectives."""
        return markers.collective(x, name, self.number, dim % x.dim(), list(lengths))

    @eager_only
    def locate_inside(self, totals: Sequence[int], packed: Split | None = None) -> None:
        """Dropouts from here on are inside; `totals` are how many features a tensor there has on all ranks together.
        packed: how features that are several parts one after the other are shared out."""
        self.is_inside = True
        state = active_state()
        if state is not None:
            state.locate = partial(self.inside, totals, packed)

    @eager_only
    def locate_outside(self) -> None:
        """Dropouts from here on are outside."""
        self.is_inside = False
        state = active_state()
        if state is not None:
            state.locate = None

    @contextmanager
    def located(self, part: Part | None) -> Iterator[None]:
        """In the block dropouts work on tensors that every rank has in full, or of whose features it has a part."""
        state = active_state()
        if state is None:
            yield
            return
        before, state.locate = state.locate, None if part is None else partial(_of_features, part)
        try:
            yield
        finally:
            state.locate = before

    def inside(
        self,
        totals: Sequence[int],
        packed: Split | None,
        shape: Sequence[int],
        kind: str,
        parts: dict[int, Part],
        key: Key | None = None,
    ) -> dict[int, Part]:
        rank, ranks = self.comm.rank, self.comm.size
        state = active_state()
        full = None if state is None or kind == "attention" else state.full_shape(key)
        if full is not None and key is not None and len(full) == len(shape):
            if key not in self._sharded_dims:
                assert state is not None
                self._sharded_dims[key] = _sharded_dim(shape, full, parts, ranks, state.full_samples)
            return parts | self._held(self._sharded_dims[key], shape, parts, packed)
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
            f"weights (batch, heads, queries, keys), or this rank's shard of {' or '.join(map(str, totals))} features"
        )

    def _held(
        self, sharded: tuple[int, int] | None, shape: Sequence[int], parts: dict[int, Part], packed: Split | None
    ) -> dict[int, Part]:
        if sharded is None:
            return {}
        dim, total = sharded
        is_packed = packed is not None and packed.length == total
        split = packed if packed is not None and is_packed else Split.even(TP, 0, total, self.comm.size)
        held = split.held[self.comm.rank]
        if len(held) != shape[dim]:
            raise UsageError(
                f"a dropout inside a tensor-parallel region works on a tensor of shape {tuple(shape)}; expected "
                f"{len(held)} of {total} along dim {dim}, as in the first step"
            )
        mine = Part(held if isinstance(held, range) else torch.as_tensor(list(held)), total)
        return {dim: mine}

    def _entered(self, x: torch.Tensor) -> torch.Tensor:
        return autograd_collectives.copy(x, self.comm)

    @eager_only
    def enter_tokens(self, value: Any) -> Any:
        """As `enter`, for arguments whose first dim are tokens: of experts. Other arguments stay as they are."""
        return self.enter(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    @eager_only
    def leave_tokens(self, part: torch.Tensor) -> torch.Tensor:
        return self.leave(part)

    def stand_in(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor that a module may ask for its shape, and pass on to layers sharded by columns, instead of x.

        It is as wide as this rank's part of the features. Used in any other way it shows: it is full of nan.
        """
        if torch.compiler.is_compiling():
            return markers.stand_in(x, self.number, self.lengths)
        entered = self.enter(x)
        nan = torch.full((), torch.nan, dtype=entered.dtype, device=entered.device)
        stand_in = nan.expand(*entered.shape[:-1], entered.shape[-1] // self.comm.size)
        setattr(stand_in, _STANDS_FOR, entered)
        return stand_in


def _of_features(
    part: Part, shape: Sequence[int], kind: str, parts: dict[int, Part], key: Key | None = None
) -> dict[int, Part]:
    return parts | {len(shape) - 1: part}


def _sharded_dim(
    shape: Sequence[int], full: Sequence[int], parts: dict[int, Part], ranks: int, samples: int
) -> tuple[int, int] | None:
    """The dim that tp's ranks share in a tensor that has the shape `full` on one device for so many samples, and its
    size there; None where the tensor is the same on all ranks. Dims in `parts` hold a part of the samples or tokens,
    alone or folded with others; without any, dim 0 holds all samples."""
    shared = [dim for dim, of in enumerate(full) if dim not in parts and shape[dim] != of]
    is_folded = 0 in shared
    for dim, part in parts.items():
        totals = (samples, part.total) if dim else (samples,)
        is_folded |= all(shape[dim] * total != full[dim] * len(part) for total in totals)
    if len(shared) > 1 or is_folded or any(abs(shape[dim] * ranks - full[dim]) >= ranks for dim in shared):
        raise UsageError(
            f"a dropout inside a tensor-parallel region works on a tensor of shape {tuple(shape)}, which is "
            f"{tuple(full)} on one device: which of its dims tp={ranks} shards is not known; keep samples, heads and "
            "features in dims of their own, or use a plan without tp"
        )
    return (shared[0], full[shared[0]]) if shared else None
