"""Sharding a batch: which samples a rank, or a microbatch, takes.

Samples are along dim 0 of every tensor of a batch unless `batch_dim` is given, as `in_dims` does for
torch.func.vmap:

    batch_dim=1                               time-major, (seq, batch, ...); of a tensor with fewer dims the last one
    batch_dim=(1, 0)                          of (inputs, targets): dim 1 of the inputs, dim 0 of the targets
    batch_dim=({"x": 0, "edges": None}, 0)    None for a tensor without samples, which every rank gets in full
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from unisono.comm.same_data import SameBatch
from unisono.comm.signatures.records import plain_record
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.mesh.random.state import SampleDim
from unisono.parallel.layout import Split
from unisono.plan.plan import DATA, Plan

BatchDim = Any  # an int or None for all tensors below, or the structure of a batch with such instead of tensors


@plain_record
class Share(NamedTuple):
    batch: Any  # of the same structure as the full batch; what is no tensor with samples is shared by all
    positions: range  # of its samples in the full batch
    of: int  # samples of the full batch
    spare: Any = None  # of a part without samples: a batch of one, to run the model on instead


def share(batch: Any, index: int, count: int, dim: BatchDim = 0) -> Share:
    """Part `index` of `count` of a batch, split along the batch dim of every tensor in it.

    Parts follow each other and differ by one sample at most, the longer ones first; where there are fewer samples than
    parts the last ones are empty. The batch may be a tensor, or tuples, lists and dicts of them.
    """
    if not 0 <= index < count:
        raise UsageError(f"part {index} of {count} of a batch; expected 0 to {count - 1}")
    if count == 1:  # nothing to shard: tensors without samples do no harm
        batch_size = first_batch_size(batch, dim)
        return Share(batch, range(batch_size), batch_size)
    batch_size = batch_size_of(batch, dim)
    held = Split.even((), 0, batch_size, count).held[index]
    assert isinstance(held, range)
    spare = batch_slice(batch, 0, 1, dim) if batch_size and not len(held) else None
    return Share(batch_slice(batch, held.start, held.stop, dim), held, batch_size, spare)


def shares(batch: Any, count: int, dim: BatchDim = 0) -> list[Share]:
    """All parts of a batch: its microbatches."""
    return [share(batch, index, count, dim) for index in range(count)]


def full_batch_of(parts: list[Share], dim: BatchDim = 0) -> Any:
    """The batch that was split into these parts, in whatever order they come; on the device of the first of them."""
    return joined_batches([part.batch for part in sorted(parts, key=lambda part: part.positions.start)], dim)


def joined_batches(parts: Sequence[Any], dim: BatchDim = 0) -> Any:
    """Batches as one, on the device of the first; of what has no samples, the first."""
    columns = zip(*(tree_flatten(part)[0] for part in parts), strict=True)
    leaves = [
        column[0] if along is None else torch.cat([leaf.to(column[0].device) for leaf in column], along)
        for column, along in zip(columns, dims_of(parts[0], dim), strict=True)
    ]
    return tree_unflatten(leaves, tree_flatten(parts[0])[1])


@contextmanager
def run_on(part: Share) -> Iterator[None]:
    """The scope of a model's run on a part. One without samples is run as well, so that ranks stay in step: on a spare
    sample or, where samples have an effect on each other, as it is, which not every layer of torch allows."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        if len(part.positions):
            raise
        raise UsageError(
            "there are fewer samples in the batch than ranks and microbatches to share them, and the model cannot run "
            f"without any ({type(error).__name__}: {error}); use larger batches, or fewer microbatches"
        ) from error


def batch_size_of(batch: Any, dim: BatchDim = 0) -> int:
    """How many samples a batch has: the length of the batch dim, in which all its tensors must agree."""
    lengths = set(_lengths(batch, dim))
    if len(lengths) == 1:
        return lengths.pop()
    paths, dims = tree_flatten_with_path(batch)[0], dims_of(batch, dim)
    found = {
        "batch" + keystr(path): f"{leaf.shape[along]} along dim {along}"
        for (path, leaf), along in zip(paths, dims, strict=True)
        if along is not None
    }
    if not found:
        raise UsageError(f"a batch of {type(batch).__name__} without tensors that have samples cannot be sharded")
    shown = ", ".join(f"{name} has {length}" for name, length in found.items())
    raise UsageError(
        f"the batch's tensors differ in their number of samples: {shown}; give their dims "
        "with batch_dim=, as batch_dim=1 for time-major batches or batch_dim=((0, None), 0) for a second input "
        "without samples"
    )


def first_batch_size(batch: Any, dim: BatchDim = 0) -> int:
    """How many samples a batch has that is not sharded, whose tensors may differ: those of the first tensor; 1 where
    none has samples."""
    return next(_lengths(batch, dim), 1)


def batch_slice(batch: Any, first: int, last: int, dim: BatchDim = 0) -> Any:
    leaves, spec = tree_flatten(batch)
    dims = dims_of(batch, dim)
    return tree_unflatten(
        [
            leaf if along is None else leaf[(slice(None),) * along + (slice(first, last),)]
            for leaf, along in zip(leaves, dims, strict=True)
        ],
        spec,
    )


def first_samples(batch: Any, count: int, dim: BatchDim = 0) -> Any:
    """Some samples of a batch; all of it where its tensors differ in their number."""
    return batch_slice(batch, 0, count, dim) if len(set(_lengths(batch, dim))) == 1 else batch


def samples_between(leaf: Any, where: SampleDim | None, batch_size: int, first: int, last: int) -> Any:
    """Of a tensor for so many samples, those of some of them; what has no samples stays as it is."""
    if where is None or where.dim is None or not batch_size or leaf.shape[where.dim] % batch_size:
        return leaf
    dim, times = where.dim, leaf.shape[where.dim] // batch_size
    if where.alternates:
        apart = leaf.unflatten(dim, (times, batch_size)).narrow(dim + 1, first, last - first)
        return apart.flatten(dim, dim + 1)
    return leaf.narrow(dim, first * times, (last - first) * times)


def _lengths(batch: Any, dim: BatchDim) -> Iterator[int]:
    for leaf, along in zip(tree_flatten(batch)[0], dims_of(batch, dim), strict=True):
        if along is not None:
            yield leaf.shape[along]


def inputs_dim(dim: BatchDim) -> BatchDim:
    """Of a batch dim of (inputs, targets), the inputs' one."""
    return dim[0] if isinstance(dim, tuple | list) else dim


def targets_dim(dim: BatchDim) -> BatchDim:
    return dim[1] if isinstance(dim, tuple | list) else dim


def require_batch_dim(dim: BatchDim) -> BatchDim:
    """UsageError for what cannot be a batch dim of (inputs, targets)."""
    is_pair = isinstance(dim, tuple | list) and len(dim) == 2
    leaves = tree_flatten(dim, is_leaf=lambda leaf: leaf is None)[0]
    if not (is_pair or isinstance(dim, int)) or not all(leaf is None or _is_dim(leaf) for leaf in leaves):
        raise UsageError(
            f"batch_dim={dim!r}: expected a dim, as 1 for time-major batches, or a pair for (inputs, targets), as "
            "(1, 0), with None for tensors without samples"
        )
    return dim


def _is_dim(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def dims_of(batch: Any, dim: BatchDim) -> list[int | None]:
    """Along which dim samples are, for every leaf of the batch; None for what has none."""
    if isinstance(dim, int):
        return [_fitting(leaf, dim) for leaf in tree_flatten(batch)[0]]
    if dim is None:
        return [None] * len(tree_flatten(batch)[0])
    if isinstance(dim, dict) and isinstance(batch, dict) and set(dim) == set(batch):
        return [each for key in batch for each in dims_of(batch[key], dim[key])]
    if isinstance(dim, tuple | list) and isinstance(batch, tuple | list) and len(dim) == len(batch):
        return [each for part, below in zip(batch, dim, strict=True) for each in dims_of(part, below)]
    given = f"keys {', '.join(map(str, batch))}" if isinstance(batch, dict) else type(batch).__name__
    if isinstance(batch, tuple | list):
        given = f"{len(batch)} parts"
    raise UsageError(f"batch_dim has {dim!r} where the batch has {given}; expected one dim, or None, for each of them")


def _fitting(leaf: Any, dim: int) -> int | None:
    """A tensor with fewer dims, as the labels of a time-major batch are, has its samples along the last one."""
    if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
        return None
    return min(dim, leaf.ndim - 1)


class OwnShare:
    """The samples of a batch that this rank trains on.

    Ranks give a trainer the same global batch, or each the `Share` of it that a Loader has read, or (batch="local")
    each data rank its own samples. All three become this rank's Share of the global batch.
    """

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

    def require_batch_size(self, mine: Share, dim: BatchDim, plan: Plan, has_spare: bool) -> None:
        """has_spare: whether parts without samples run on a spare one."""
        batch_size = first_batch_size(mine.batch, dim)
        if batch_size != len(mine.positions):
            raise UsageError(
                f"a share of {batch_size} samples that declares {len(mine.positions)} of {mine.of}; "
                "shard batches with unisono.parallel.share.share, or give the full batch"
            )
        ranks = self.part[1]
        if plan.pp > 1 and not has_spare and mine.of < ranks * plan.microbatches:
            raise UsageError(
                f"a batch of {mine.of} samples for {ranks} data ranks x {plan.microbatches} microbatches of a "
                f"pipeline; expected at least {ranks * plan.microbatches}: use fewer microbatches"
            )


def _shown(samples: Sequence[int]) -> str:
    return f"{samples[0]} to {samples[-1]}" if samples else "none"
