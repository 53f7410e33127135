"""Planners of torch.distributed.checkpoint that write and read an inventory.

Each rank writes chunks that no other writes, and reads the overlap of the stored chunks with its own: torch's
resharding works on boxes, whatever plan made them. No rank holds a full tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from unisono.errors import CheckpointError
from unisono.train.checkpoint.chunks import Chunk
from unisono.train.checkpoint.inventory import Entry


class ChunkSavePlanner(SavePlanner):
    """Writes the chunks of this rank; `tensors`: their contents, by entry and chunk."""

    def __init__(self, entries: Sequence[Entry], tensors: Sequence[torch.Tensor]) -> None:
        chunks = [(entry, chunk) for entry in entries for chunk in entry.written]
        self._items = [_write_item(entry, chunk) for entry, chunk in chunks]
        self._tensors = dict(zip((item.index for item in self._items), tensors, strict=True))

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        stored: dict[str, Any] = {}
        for item in self._items:
            data = item.tensor_data
            assert data is not None
            known = stored.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, []))
            known.chunks.append(data.chunk)
        return all_plans, Metadata(stored)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._tensors[write_item.index]


def _write_item(entry: Entry, chunk: Chunk) -> WriteItem:
    box = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
    data = TensorWriteData(box, TensorProperties(dtype=entry.tensor.dtype), torch.Size(entry.shape))
    return WriteItem(MetadataIndex(entry.name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


class ChunkLoadPlanner(LoadPlanner):
    """Fills this rank's chunks of each entry."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._chunks = {(entry.name, chunk.offsets): chunk for entry in entries for chunk in entry.held}
        self._metadata: Metadata | None = None

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for entry in self._entries.values() for item in self._reads(entry)])

    def _reads(self, entry: Entry) -> list[ReadItem]:
        assert self._metadata is not None
        stored = self._metadata.state_dict_metadata.get(entry.name)
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"the checkpoint has no {entry.name}; is it of another model, or another optimizer?")
        if tuple(stored.size) != entry.shape:
            raise CheckpointError(
                f"{entry.name} is of shape {tuple(stored.size)} in the checkpoint; expected {entry.shape}"
            )
        boxes = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.held]
        items = create_read_items_for_chunk_list(entry.name, stored, boxes)
        found = sum(math.prod(item.lengths) for item in items)
        wanted = sum(math.prod(chunk.sizes) for chunk in entry.held)
        if found != wanted:
            raise CheckpointError(f"the checkpoint holds {found} of the {wanted} elements of {entry.name} needed here")
        return items

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is not a tensor; checkpoints contain nothing else")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The destination of a read: a view of the rank's shard."""
        name, offsets = read_item.dest_index.fqn, read_item.dest_index.offset
        assert offsets is not None
        chunk = self._chunks[name, tuple(offsets)]
        view = self._entries[name].tensor[chunk.slices]
        for dim, (first, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, first, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass
