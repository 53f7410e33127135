"""One save under way: each rank writes its file aside; rank 0 publishes when all have.

    .writing-<step>-<token>/           rank-00000.safetensors  rank-00000.json  ...
        -> manifest.json               once every rank's .json is there
    step-<step>/                       the same folder, renamed: it is there as a whole, or not at all

Ranks meet through these files and not through messages, so that all of it can run in a thread beside training.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from unisono.train.inventory import Inventory
from unisono.train.manifest import merged
from unisono.train.planners import ChunkSavePlanner
from unisono.train.storage import RankWriter, sync_folder

ASIDE = ".writing-"
_REPLACED = ".replaced-"
_GONE = ".gone-"
_SHORTEST_NAP, _LONGEST_NAP = 0.002, 0.2


def folder_of(step: int) -> str:
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Target:
    """Where a save goes, and who writes it."""

    folder: Path
    step: int
    token: str  # of the job, so that what a killed one left is not taken for a part of this
    rank: int
    ranks: int

    @property
    def aside(self) -> Path:
        return self.folder / f"{ASIDE}{self.step:08d}-{self.token}"

    @property
    def published(self) -> Path:
        return self.folder / folder_of(self.step)

    def name(self, rank: int, suffix: str) -> str:
        return f"rank-{rank:05d}.{suffix}"


class Saving:
    """A rank's side of a save. `write` and, on rank 0, `publish`; `start` runs both in a thread."""

    def __init__(
        self,
        target: Target,
        inventory: Inventory,
        tensors: Sequence[torch.Tensor],
        about: dict[str, Any],
        keep: int | None,
    ) -> None:
        self.target = target
        self._inventory = inventory
        self._planner = ChunkSavePlanner(inventory.entries, tensors)
        self._about = about
        self._keep = keep
        self._given_up = threading.Event()
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
        """Wait until this rank's part is written; what went wrong."""
        if self._thread is None:
            self.write()
        self._written.wait()
        return self.write_error

    def published(self) -> str | None:
        """On rank 0, after all have written: wait until the checkpoint is published; what went wrong."""
        if self._thread is None:
            self.publish()
        else:
            self._thread.join()
        return self.publish_error

    def settle(self, seconds: float) -> None:
        """Let the thread come to its end, but no longer than that: on rank 0 it waits for other ranks' parts."""
        if self._thread is not None:
            self._thread.join(seconds)

    def give_up(self) -> None:
        """After a failure: remove what was written aside. Rank 0 calls it when no rank writes any more."""
        self._given_up.set()
        if self._thread is not None:
            self._thread.join()
        shutil.rmtree(self.target.aside, ignore_errors=True)

    # ---- the work ------------------------------------------------------------------------------------------------

    def write(self) -> None:
        target = self.target
        try:
            target.aside.mkdir(parents=True, exist_ok=True)
            writer = RankWriter(target.aside / target.name(target.rank, "safetensors"))
            save_part(writer, self._planner)
            told = {
                **self._inventory.told,
                "tensors": writer.stored,
                "file": writer.path.name,
                "bytes": writer.size,
                "sha256": writer.checksum,
            }
            self._leave_word(told)
        except OSError as error:
            self.write_error = (
                f"{error.strerror or error} ({error.filename or target.aside}); the rank had "
                f"{_shown_bytes(self._inventory.nbytes)} to write{_room_in(target.folder)}"
            )
        except Exception as error:
            self.write_error = f"{type(error).__name__}: {error}"
        finally:
            self._written.set()

    def _leave_word(self, told: dict[str, Any]) -> None:
        path = self.target.aside / self.target.name(self.target.rank, "json")
        draft = path.with_suffix(".draft")
        with open(draft, "w", encoding="utf-8") as file:
            file.write(json.dumps(told, separators=(",", ":")))
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)

    def publish(self) -> None:
        """Wait for every rank's word, write the manifest, and give the folder its name."""
        target = self.target
        words = [target.aside / target.name(rank, "json") for rank in range(target.ranks)]
        try:
            if not self._await(words):
                return
            parts = [json.loads(word.read_text(encoding="utf-8")) for word in words]
            merged(parts, **self._about).write(target.aside)
            for word in words:
                word.unlink()
            sync_folder(target.aside)
            replace_folder(target.aside, target.published)
            if self._keep is not None:
                forget(target.folder, self._keep, target.step)
        except Exception as error:
            self.publish_error = f"{type(error).__name__}: {error}"

    def _await(self, words: Sequence[Path]) -> bool:
        nap = _SHORTEST_NAP
        for word in words:
            while not word.exists():
                if self._given_up.wait(nap):
                    return False
                nap = min(2 * nap, _LONGEST_NAP)
        return True


def save_part(writer: RankWriter, planner: ChunkSavePlanner) -> None:
    """torch's save, on this rank alone."""
    # It warns, from any thread, that it does not talk to others, which is what we are after.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    try:
        dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise cause_of(error) from error


def cause_of(error: CheckpointException) -> BaseException:
    """What torch has wrapped."""
    return next(iter(error.failures.values()))[0]


def replace_folder(aside: Path, published: Path) -> None:
    """Rename, and let an older one of that name go; at every moment one of the two is there (see `path_of`)."""
    replaced = published.with_name(_REPLACED + published.name)
    if published.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        published.rename(replaced)
    aside.rename(published)
    sync_folder(published.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def steps_in(folder: Path) -> list[int]:
    """Published steps, oldest first."""
    if not folder.is_dir():
        return []
    names = [path.name for path in (*folder.glob("step-*"), *folder.glob(_REPLACED + "step-*")) if path.is_dir()]
    numbers = {name.removeprefix(_REPLACED).removeprefix("step-") for name in names}
    return sorted(int(number) for number in numbers if number.isdigit())


def path_of(folder: Path, step: int) -> Path:
    """The folder of a step; where a job was killed while it put a new one in its place, the old one."""
    published = folder / folder_of(step)
    replaced = folder / (_REPLACED + published.name)
    return replaced if replaced.exists() and not published.exists() else published


def forget(folder: Path, keep: int, saved: int) -> None:
    """All but the newest, of which the one just saved is one; none is ever half there under its name."""
    for step in sorted(steps_in(folder), key=lambda step: (step == saved, step))[:-keep]:
        gone = folder / f"{_GONE}{step:08d}"
        with contextlib.suppress(OSError):  # one too many is no reason to stop
            (folder / folder_of(step)).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def tidy(folder: Path) -> None:
    """Remove what jobs that were killed have left behind. Only who is about to write does it: one job at a time."""
    for left in [*folder.glob(ASIDE + "*"), *folder.glob(_GONE + "*")]:
        shutil.rmtree(left, ignore_errors=True)
    for left in folder.glob(_REPLACED + "*"):
        published = folder / left.name.removeprefix(_REPLACED)
        if published.exists():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.rename(published)


def _room_in(folder: Path) -> str:
    try:
        return f", {_shown_bytes(shutil.disk_usage(folder).free)} are free"
    except OSError:
        return ""


def _shown_bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
