"""One save: each rank writes its file to a temporary folder; rank 0 publishes it when all have finished.

    .writing-<step>-<token>/           rank-00000.safetensors  rank-00000.json  ...
        -> manifest.json               when the .json of every rank exists
    step-<step>/                       the same folder, renamed atomically

Ranks synchronise through these files and not through collectives, so that a save can run in a thread beside training.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from unisono.amounts import format_bytes
from unisono.errors import CheckpointError
from unisono.train.checkpoint.chunk_files import CHECKSUM, RankWriter, sync_folder
from unisono.train.checkpoint.dcp_planners import ChunkSavePlanner
from unisono.train.checkpoint.inventory import Inventory
from unisono.train.checkpoint.manifest import merged

TEMPORARY = ".writing-"
_REPLACED = ".replaced-"
_DELETED = ".gone-"
_MIN_SLEEP, _MAX_SLEEP = 0.002, 0.2


def folder_of(step: int) -> str:
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Target:
    """The destination of a save, and the rank that writes."""

    folder: Path
    step: int
    token: str  # of the job, to distinguish files that a killed one left
    rank: int
    ranks: int

    @property
    def temporary(self) -> Path:
        return self.folder / f"{TEMPORARY}{self.step:08d}-{self.token}"

    @property
    def published(self) -> Path:
        return self.folder / folder_of(self.step)

    def name(self, rank: int, suffix: str) -> str:
        return f"rank-{rank:05d}.{suffix}"


class Saving:
    """One rank's part of a save: `write` and, on rank 0, `publish`; `start` runs both in a thread."""

    def __init__(
        self,
        target: Target,
        inventory: Inventory,
        tensors: Sequence[torch.Tensor],
        about: dict[str, Any],
        keep: int | None,
        lost: Callable[[], str] = str,
    ) -> None:
        """lost: why the folder is no longer this job's, "" if it is; asked before the checkpoint is published."""
        self.target = target
        self._inventory = inventory
        self._planner = ChunkSavePlanner(inventory.entries, tensors)
        self._about = about
        self._keep = keep
        self._lost = lost
        self._aborted = threading.Event()
        self._written = threading.Event()
        self._thread: threading.Thread | None = None
        self.write_error: str | None = None
        self.publish_error: str | None = None

    # ---- in this thread or another -------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"unisono save {self.target.step}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.write()
        if self.target.rank == 0 and self.write_error is None:
            self.publish()

    def written(self) -> str | None:
        """Wait until this rank's part is written; return the error, if any."""
        if self._thread is None:
            self.write()
        self._written.wait()
        return self.write_error

    def published(self) -> str | None:
        """On rank 0, after all have written: wait until the checkpoint is published; return the error, if any."""
        if self._thread is None:
            self.publish()
        else:
            self._thread.join()
        return self.publish_error

    def settle(self, seconds: float) -> None:
        """Wait for the thread, up to a limit: on rank 0 it waits for other ranks."""
        if self._thread is not None:
            self._thread.join(seconds)

    def abort(self) -> None:
        """After a failure: remove the temporary folder. Rank 0 calls it when no rank writes any more."""
        self._aborted.set()
        if self._thread is not None:
            self._thread.join()
        shutil.rmtree(self.target.temporary, ignore_errors=True)

    # ---- the work ------------------------------------------------------------------------------------------------

    def write(self) -> None:
        target = self.target
        try:
            target.temporary.mkdir(parents=True, exist_ok=True)
            writer = RankWriter(target.temporary / target.name(target.rank, "safetensors"))
            save_part(writer, self._planner)
            index = {
                **self._inventory.metadata,
                "tensors": writer.stored,
                "file": writer.path.name,
                "bytes": writer.size,
                CHECKSUM: writer.checksum,
            }
            self._write_index(index)
        except OSError as error:
            self.write_error = (
                f"{error.strerror or error} ({error.filename or target.temporary}); the rank had "
                f"{format_bytes(self._inventory.nbytes)} to write{_free_space(target.folder)}"
            )
        except Exception as error:
            self.write_error = f"{type(error).__name__}: {error}"
        finally:
            self._written.set()

    def _write_index(self, index: dict[str, Any]) -> None:
        path = self.target.temporary / self.target.name(self.target.rank, "json")
        draft = path.with_suffix(".draft")
        with open(draft, "w", encoding="utf-8") as file:
            file.write(json.dumps(index, separators=(",", ":")))
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)

    def publish(self) -> None:
        """Wait for the index of every rank, write the manifest, and rename the folder."""
        target = self.target
        indices = [target.temporary / target.name(rank, "json") for rank in range(target.ranks)]
        try:
            if not self._await(indices):
                return
            parts = [json.loads(index.read_text(encoding="utf-8")) for index in indices]
            merged(parts, **self._about).write(target.temporary)
            for index in indices:
                index.unlink()
            sync_folder(target.temporary)
            if lost := self._lost():
                raise CheckpointError(lost)
            replace_folder(target.temporary, target.published)
            if self._keep is not None:
                delete_old(target.folder, self._keep, target.step)
        except Exception as error:
            self.publish_error = f"{type(error).__name__}: {error}"

    def _await(self, paths: Sequence[Path]) -> bool:
        sleep = _MIN_SLEEP
        for path in paths:
            while not path.exists():
                if self._aborted.wait(sleep):
                    return False
                sleep = min(2 * sleep, _MAX_SLEEP)
        return True


def save_part(writer: RankWriter, planner: ChunkSavePlanner) -> None:
    """torch's save on this rank alone, without its warning about that."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    try:
        dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise cause_of(error) from error


def cause_of(error: CheckpointException) -> BaseException:
    """The error that torch has wrapped."""
    return next(iter(error.failures.values()))[0]


def replace_folder(temporary: Path, published: Path) -> None:
    """Rename, and delete an older folder of that name; one of the two exists at all times (see `path_of`)."""
    replaced = published.with_name(_REPLACED + published.name)
    if published.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        published.rename(replaced)
    temporary.rename(published)
    sync_folder(published.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def steps_in(folder: Path) -> list[int]:
    """Published steps, oldest first."""
    if not folder.is_dir():
        return []
    names = {path.name.removeprefix(_REPLACED) for path in folder.iterdir() if path.is_dir()}
    found = ((name, re.fullmatch(r"step-([0-9]{8,18})", name)) for name in names)
    return sorted(int(match[1]) for name, match in found if match and folder_of(int(match[1])) == name)


def path_of(folder: Path, step: int) -> Path:
    """The folder of a step; the replaced one, if a job was killed between the two renames."""
    published = folder / folder_of(step)
    replaced = folder / (_REPLACED + published.name)
    return replaced if replaced.exists() and not published.exists() else published


def delete_old(folder: Path, keep: int, saved: int) -> None:
    """Delete all but the newest `keep`, among them the one just saved; each is renamed before it is deleted."""
    for step in sorted(steps_in(folder), key=lambda step: (step == saved, step))[:-keep]:
        deleted = folder / f"{_DELETED}{step:08d}"
        with contextlib.suppress(OSError):  # one checkpoint too many is harmless
            (folder / folder_of(step)).rename(deleted)
        shutil.rmtree(deleted, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove files of killed jobs. Only a job that is about to write calls it: one job at a time."""
    for left in [*folder.glob(TEMPORARY + "*"), *folder.glob(_DELETED + "*")]:
        shutil.rmtree(left, ignore_errors=True)
    for left in folder.glob(_REPLACED + "*"):
        published = folder / left.name.removeprefix(_REPLACED)
        if published.exists():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.rename(published)


def _free_space(folder: Path) -> str:
    try:
        return f", {format_bytes(shutil.disk_usage(folder).free)} are free"
    except OSError:
        return ""


_ALIGNMENT = 64


class Staging:
    """Copies of tensors in host memory, so that training continues while they are written.

    The memory is reused: mapping new pages costs more than the copy itself. It is pinned if tensors come from a GPU.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copied(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies that are valid until the next call."""
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        self._grow(sum(sizes), pinned=on_gpu)
        copies, first = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            copy = self._memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copy.copy_(tensor, non_blocking=tensor.is_cuda)
            copies.append(copy)
            first += size
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    def _grow(self, size: int, pinned: bool) -> None:
        if len(self._memory) < size or (pinned and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory first
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
