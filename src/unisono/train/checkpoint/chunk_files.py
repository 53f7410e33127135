"""Files of a checkpoint: one safetensors file for each rank, written in one pass with its checksum, read by mmap.

A file is a JSON header and bytes; nothing in it can be executed. Each chunk is a tensor `<name>@<offsets>` in it,
largest element size first, so that every chunk is aligned. The manifest has an index of all chunks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import xxhash
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from unisono.mesh.deferred_init.weight_files import SAFE_NAMES
from unisono.regular_files import open_regular, require_regular
from unisono.train.checkpoint.inventory import dtype_name

# The checksum of a data file finds damage, and no adversary, who can write the manifest too. GB/s of one core: xxh3_128
# 9.7, zlib.crc32 2.1, sha256 1.1; torch.hash_tensor, at 7.0, does not notice that blocks have changed places.
CHECKSUM = "xxh3_128"
CHECKSUMS: dict[str, Callable[[], Any]] = {CHECKSUM: xxhash.xxh3_128, "sha256": hashlib.sha256}  # sha256: older files
_BLOCK = 1 << 22
_HEADER_ALIGNMENT = 64


class Stored(NamedTuple):
    """A chunk in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int  # in bytes
    end: int


class ChecksumFile:
    """A file that is written sequentially, with its checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = CHECKSUMS[CHECKSUM]()
        self.size = 0

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        for first in range(0, len(view), _BLOCK):
            block = view[first : first + _BLOCK]
            self._hash.update(block)
            self._file.write(block)
        self.size += len(view)

    @property
    def checksum(self) -> str:
        return self._hash.hexdigest()


def checksum_of(path: Path, algorithm: str = CHECKSUM) -> str:
    found = CHECKSUMS[algorithm]()
    with open_regular(path) as file:
        memory = bytearray(_BLOCK)
        while count := file.readinto(memory):  # type: ignore[attr-defined]  # a FileIO
            found.update(memoryview(memory)[:count])
    checksum: str = found.hexdigest()
    return checksum


def bytes_of(tensor: torch.Tensor) -> Any:
    """The elements of a tensor on the host, in row-major order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


Described = tuple[str, torch.dtype, Sequence[int]]  # a tensor's name, dtype and shape


def safetensors_header(tensors: Sequence[Described]) -> tuple[bytes, list[tuple[int, int]]]:
    """The header of a safetensors file of these tensors, and the byte range of each in the file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ranges, first = [], 0
    for name, dtype, shape in tensors:
        size = dtype.itemsize * torch.Size(shape).numel()
        known = SAFE_NAMES.get(dtype)  # the format has no complex numbers: stored as bytes
        entries[name] = {
            "dtype": known or "U8",
            "shape": list(shape) if known else [size],
            "data_offsets": [first, first + size],
        }
        ranges.append((first, first + size))
        first += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return head, [(len(head) + begin, len(head) + end) for begin, end in ranges]


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class RankWriter(StorageWriter):
    """Writes one rank's file; sets `stored`, `size` and `checksum`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stored: dict[str, dict[str, Any]] = {}
        self.size, self.checksum = 0, ""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        items = sorted(plan.items, key=lambda item: -_properties(item).dtype.itemsize)
        described = []
        for item in items:
            assert item.tensor_data is not None
            where = ",".join(map(str, item.tensor_data.chunk.offsets))
            described.append((f"{item.index.fqn}@{where}", _properties(item).dtype, item.tensor_data.chunk.sizes))
        head, ranges = safetensors_header(described)
        results = []
        with open(self.path, "wb", buffering=1 << 20) as file:
            out = ChecksumFile(file)
            out.write(head)
            for item, (begin, end) in zip(items, ranges, strict=True):
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor)
                out.write(bytes_of(tensor))
                results.append(WriteResult(item.index, end - begin, self._record(item, begin, end)))
            file.flush()
            os.fsync(file.fileno())
        self.size, self.checksum = out.size, out.checksum
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _record(self, item: WriteItem, begin: int, end: int) -> Stored:
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        stored = Stored(tuple(chunk.offsets), tuple(chunk.sizes), self.path.name, begin, end)
        about = {"dtype": dtype_name(_properties(item).dtype), "shape": list(item.tensor_data.size), "chunks": []}
        self.stored.setdefault(item.index.fqn, about)["chunks"].append(stored)
        return stored

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _properties(item: WriteItem) -> TensorProperties:
    assert item.tensor_data is not None
    return item.tensor_data.properties


class IndexReader(StorageReader):
    """Reads chunks from the files of a folder by the manifest's index; nothing is unpickled."""

    def __init__(self, folder: Path, stored: dict[str, Any]) -> None:
        """`stored`: {name: {"dtype", "shape", "chunks": [Stored]}}, only names that will be read."""
        self._folder = folder
        self._stored = stored
        self._chunks = {
            MetadataIndex(name, chunk.offsets): (chunk, about["dtype"])
            for name, about in stored.items()
            for chunk in about["chunks"]
        }
        self._files: dict[str, torch.Tensor] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, about["dtype"])),
                    torch.Size(about["shape"]),
                    [
                        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                        for chunk in about["chunks"]
                    ],
                )
                for name, about in self._stored.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            chunk, dtype = self._chunks[item.storage_index]
            content = self._mapped(chunk.file)[chunk.begin : chunk.end].view(getattr(torch, dtype)).view(chunk.sizes)
            for dim, (first, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                content = content.narrow(dim, first, length)
            target = planner.resolve_tensor(item)
            target.copy_(content)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _mapped(self, file: str) -> torch.Tensor:
        if file not in self._files:
            path = self._folder / file
            require_regular(path)
            self._files[file] = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        return self._files[file]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
