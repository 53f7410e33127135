"""Cutting a batch: which samples a rank, or a microbatch, takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

from unisono.errors import UsageError
from unisono.parallel.layout import Split


class Share(NamedTuple):
    batch: Any  # of the same structure as the whole; what is no tensor with rows is shared by all
    positions: range  # of its rows among those of the whole
    of: int  # rows of the whole


def share(batch: Any, index: int, count: int) -> Share:
    """Part `index` of `count` of a batch, cut along dim 0 of every tensor in it.

    Parts follow each other and differ by one row at most, the longer ones first; where there are fewer rows than parts
    the last ones are empty. The batch may be a tensor, or tuples, lists and dicts of them.
    """
    if not 0 <= index < count:
        raise UsageError(f"part {index} of {count} of a batch; expected 0 to {count - 1}")
    rows = rows_of(batch)
    held = Split.even((), 0, rows, count).held[index]
    assert isinstance(held, range)
    return Share(rows_between(batch, held.start, held.stop), held, rows)


def shares(batch: Any, count: int) -> list[Share]:
    """All parts of a batch: its microbatches."""
    return [share(batch, index, count) for index in range(count)]


@contextmanager
def run_on(part: Share) -> Iterator[None]:
    """The scope of a model's run on a part. One without rows is run as well, so that ranks stay in step; not every
    layer of torch can be."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        if rows_of(part.batch):
            raise
        raise UsageError(
            "there are fewer samples in the batch than ranks and microbatches to share them, and the model cannot run "
            f"without any ({type(error).__name__}: {error}); use larger batches, or fewer microbatches"
        ) from error


def rows_of(batch: Any) -> int:
    """How many samples a batch has: the length of dim 0, in which all its tensors must agree."""
    lengths = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim}
    if len(lengths) == 1:
        return lengths.pop()
    found: dict[str, int] = {}
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            found["batch" + "".join(map(str, path))] = leaf.shape[0]
    if not found:
        raise UsageError(f"a batch of {type(batch).__name__} without tensors that have rows cannot be cut")
    shown = ", ".join(f"{name} has {rows}" for name, rows in found.items())
    raise UsageError(f"the batch's tensors differ in their number of rows (dim 0): {shown}; expected one a sample")


def rows_between(batch: Any, first: int, last: int) -> Any:
    def piece(leaf: Any) -> Any:
        return leaf[first:last] if isinstance(leaf, torch.Tensor) and leaf.ndim else leaf

    return tree_map(piece, batch)
