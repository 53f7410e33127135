"""Tensor parallelism in a compiled graph: markers that Dynamo records, and the collectives that they become.

Dynamo traces the layers of tensor parallelism as the functions below, which take tensors and numbers only, and which it
does not trace through (`MARKERS`). When the graph is rewritten (rewrite.py), each is replaced:

    enter      the region's input, once for all layers that share it: a copy, or under sp an all-gather
    leave      the sum of all ranks' parts, or under sp this rank's shard of it
    stand_in   what an attention module sees instead of its input; layers that it passes it to enter the region
    inside     nothing: dropouts from there on are inside the region, until the next `leave`
    collective one of autograd_collectives

Their forwards and backwards are ops (`unisono::all_reduce` and others), as autograd_collectives has them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from unisono.comm.communicator import Communicator
from unisono.mesh import autograd_collectives
from unisono.mesh.collective_ops import EAGER_ONLY, Numbered
from unisono.mesh.global_index import Part
from unisono.mesh.random.active import active_state
from unisono.mesh.random.state import Key, Locate
from unisono.parallel.layout import Split


class TracedRegion(Protocol):
    """A tensor-parallel region, as graphs know it; see tensor/region.py."""

    comm: Communicator

    @property
    def outside(self) -> Locate | None: ...

    def inside(
        self,
        totals: Sequence[int],
        packed: Split | None,
        shape: Sequence[int],
        kind: str,
        parts: dict[int, Part],
        key: Key | None = None,
    ) -> dict[int, Part]: ...


_regions: Numbered[TracedRegion] = Numbered()
_features: dict[Hashable, int] = {}
_feature_sets: list[tuple[Sequence[int], Split | None]] = []


def register(region: TracedRegion) -> int:
    """The number of a region in graphs."""
    return _regions.add(region)


def features_number(totals: Sequence[int], packed: Split | None) -> int:
    """The number, in graphs, of the features of a tensor in a region: see Region.locate_inside."""
    key = (tuple(totals), repr(packed))
    if key not in _features:
        _features[key] = len(_feature_sets)
        _feature_sets.append((totals, packed))
    return _features[key]


# In a graph: "inside" a region, with its features; "outside" of one; or None where the region was entered
Location = tuple[str, int, int] | None


def locate(location: Location) -> Locate | None:
    """Gives the random state where a dropout is."""
    if location is None:
        return None
    where, region, features = location
    if where == "outside":
        return _regions[region].outside
    totals, packed = _feature_sets[features]
    return partial(_regions[region].inside, totals, packed)


# ---- markers: called by Dynamo on fake tensors ---------------------------------------------------------------------


def enter(x: torch.Tensor, region: int, width: int, lengths: list[int]) -> torch.Tensor:
    """lengths: of all ranks' shards of the sequence, under sp."""
    shape = [*x.shape[:-1], width]
    if lengths:
        shape[1] = sum(lengths)
    return x.new_empty(shape)


def leave(part: torch.Tensor, region: int, lengths: list[int]) -> torch.Tensor:
    shape = list(part.shape)
    if lengths:
        shape[1] = lengths[_regions[region].comm.rank]
    return part.new_empty(shape)


def stand_in(x: torch.Tensor, region: int, lengths: list[int]) -> torch.Tensor:
    return enter(x, region, x.shape[-1] // _regions[region].comm.size, lengths)


def inside(x: torch.Tensor, region: int, features: int) -> torch.Tensor:
    return x.new_empty(x.shape)


def collective(x: torch.Tensor, name: str, region: int, dim: int, lengths: list[int]) -> torch.Tensor:
    shape = list(x.shape)
    if name == "gather":
        shape[dim] = sum(lengths)
    elif name == "split":
        shape[dim] = lengths[_regions[region].comm.rank]
    return x.new_empty(shape)


COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send",
    "recv",
)
MARKERS: tuple[Callable[..., Any], ...] = (enter, leave, stand_in, inside, collective)


def never_traced() -> Iterator[Callable[..., Any]]:
    """Functions at which Dynamo fails, as their result depends on what is only known when they run."""
    yield active_state
    yield from EAGER_ONLY
    for base in Communicator.__mro__:
        for name in COLLECTIVES:
            if name in vars(base):
                yield vars(base)[name]


# ---- what they become: called by AOTAutograd -----------------------------------------------------------------------


def enter_form(x: torch.Tensor, region: int, lengths: list[int]) -> torch.Tensor:
    comm = _regions[region].comm
    if not lengths:
        return autograd_collectives.copy(x, comm)
    if x.shape[1] != lengths[comm.rank]:
        raise ValueError(f"a layer inside the blocks is given {x.shape[1]} tokens, and this rank has {lengths}")
    return autograd_collectives.gather_to_use(x, 1, lengths, comm)


def leave_form(part: torch.Tensor, region: int, lengths: list[int]) -> torch.Tensor:
    comm = _regions[region].comm
    if not lengths:
        return autograd_collectives.reduce(part, comm)
    return autograd_collectives.reduce_to_shard(part, 1, lengths, comm)


def stand_in_form(x: torch.Tensor, region: int, lengths: list[int]) -> torch.Tensor:
    """Where it is used in another way than to enter the region, it shows: see Region.stand_in."""
    nan = torch.full((), torch.nan, dtype=x.dtype, device=x.device)
    return nan.expand(stand_in(x, region, lengths).shape)


def collective_form(x: torch.Tensor, name: str, region: int, dim: int, lengths: list[int]) -> torch.Tensor:
    comm: Communicator = _regions[region].comm
    function: Callable[..., torch.Tensor] = getattr(autograd_collectives, name)
    return function(x, comm) if name in ("copy", "reduce") else function(x, dim, lengths, comm)
