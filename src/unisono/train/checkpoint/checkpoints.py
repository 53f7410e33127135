"""Checkpoints: a trainer's state on disk, which can be loaded under any other plan.

    checkpoints = uni.Checkpoints("runs/gpt", keep=3)
    checkpoints.save(trainer, step, loader.state_dict(), wait=False)      # written in the background
    restored = checkpoints.load(trainer)                                  # under this plan or another
    loader.load_state_dict(restored.data_state)

Every rank calls these; the folder must be visible to all ranks. Each rank writes its part to a temporary folder, which
is renamed when all have finished, and is a checkpoint only then. A failure leaves earlier checkpoints intact.
"""

from __future__ import annotations

import copy
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from unisono.comm.rendezvous import world
from unisono.errors import CheckpointError, UnisonoError, UsageError
from unisono.parallel.trainer import Trainer
from unisono.train.checkpoint.folder_lock import FolderLock
from unisono.train.checkpoint.inventory import Inventory, Shapes, collect, shapes_here
from unisono.train.checkpoint.manifest import NAME as MANIFEST
from unisono.train.checkpoint.manifest import Manifest, differences, shown
from unisono.train.checkpoint.restoring import Restoration
from unisono.train.checkpoint.saving import Saving, Staging, Target, folder_of, path_of, remove_leftovers, steps_in
from unisono.train.data.sampler import require_whole_number

_SETTLE_TIMEOUT = 30.0  # seconds that a failed rank waits for a checkpoint that is being written


class Found(NamedTuple):
    """A validated checkpoint."""

    step: int
    path: Path
    note: str  # newer ones that are damaged, and why; "" if none


@dataclass(frozen=True)
class Restored:
    step: int
    data_state: Any
    plan: str  # under which it was saved
    extra: Any
    note: str


class Checkpoints:
    """The checkpoints in a folder.

    Args:
        folder: Where they are.
        keep: How many of the newest are kept; None: all.
    """

    def __init__(self, folder: str | Path, keep: int | None = 3) -> None:
        self.folder = Path(folder)
        self.keep = None if keep is None else require_whole_number("keep", keep, 1)
        self._staging = Staging()
        self._pending: Saving | None = None
        self._token = ""  # of this job's saves; "" before the first
        self.lock: FolderLock | None = None  # that of a run folder around this one; else from the first save on

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.folder)!r}, keep={self.keep})"

    # ---- saving --------------------------------------------------------------------------------------------------

    def save(
        self, trainer: Trainer, step: int, data_state: Any = None, extra: Any = None, *, wait: bool = True
    ) -> None:
        """Save as `step`; extra: numbers, strings and tensors in lists and dicts, the same on all ranks.

        wait=False returns after the state is copied to host memory. If writing fails after that, the next `save` or
        `wait` raises the error, on every rank.
        """
        require_whole_number("step", step, 0)
        trainer.loss.settle()
        self.wait()
        if not self._token:
            self.require_same_model(trainer)
        self._begin(trainer, step, data_state, collect(trainer, extra), wait)

    def save_weights(self, trainer: Trainer, step: int) -> Path:
        """Save the model without optimizer and generators, for export. Every rank calls it."""
        trainer.loss.settle()
        self.wait()
        self._begin(trainer, step, None, collect(trainer, weights_only=True), wait=True)
        return self._path(step)

    def _begin(self, trainer: Trainer, step: int, data_state: Any, inventory: Inventory, wait: bool) -> None:
        self._require_lock()
        if not self._token:  # this job writes to the folder from now on
            if self._rank == 0:
                remove_leftovers(self.folder)
            self._token = self._from_first(secrets.token_hex(4))
        tensors = [entry.tensor[chunk.slices] for entry in inventory.entries for chunk in entry.written]
        about = {
            "step": step,
            "plan": str(trainer.plan),
            "ranks": self._ranks,
            "seed": trainer.random.seed,
            "data": copy.deepcopy(data_state),  # the caller may change it before it is written
        }
        target = Target(self.folder, step, self._token, self._rank, self._ranks)
        if wait:
            self._pending = Saving(target, inventory, tensors, about, self.keep, self._lost)
            self.wait()
        else:
            self._pending = Saving(target, inventory, self._staging.copied(tensors), about, self.keep, self._lost)
            self._pending.start()

    def _require_lock(self) -> None:
        """UsageError on every rank if another job writes to the folder."""
        if self.lock is None:
            self.lock = FolderLock(self.folder)
        else:
            self.lock.require()

    def _lost(self) -> str:
        """Why the folder is no longer this job's; "" if it is."""
        return "" if self.lock is None else self.lock.problem()

    def close(self) -> None:
        """Give the folder back, so that another job may save there. A later save takes it again."""
        if self.lock is not None:
            self.lock.release()
        self.lock = None

    def wait(self) -> None:
        """Wait until the pending checkpoint is published; every rank calls it, at the latest when training ends."""
        saving, self._pending = self._pending, None
        if saving is None:
            return
        failures = {rank: error for rank, error in enumerate(self._from_all(saving.written())) if error is not None}
        if not failures and (error := self._from_first(saving.published() if self._rank == 0 else None)) is not None:
            failures[0] = error
        if failures:
            if self._rank == 0:
                saving.abort()
            self._from_first(None)  # until then: a next save of the step writes to the same folder
            self._require_lock()
            rank, error = min(failures.items())
            before = "earlier checkpoints are intact" if steps_in(self.folder) else "there is no earlier one"
            raise CheckpointError(
                f"the checkpoint of step {saving.target.step} was not saved in {self.folder}: rank {rank}: {error}"
                + (f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else "")
                + f"; {before}"
            )

    def tidy(self) -> None:
        """Remove what killed jobs left half-written, which may fill the disk; only a job that has the folder calls it.
        Every rank does."""
        if self._rank == 0:
            remove_leftovers(self.folder)
        self._from_first(None)

    def settle(self) -> None:
        """After a failure: wait for a pending write, without communication."""
        if self._pending is not None:
            self._pending.settle(_SETTLE_TIMEOUT)

    def steps(self) -> list[int]:
        """Published steps, oldest first; `newest_good` validates them."""
        return steps_in(self.folder)

    # ---- loading -------------------------------------------------------------------------------------------------

    def newest_good(self) -> Found | None:
        """The newest checkpoint whose checksums match, or None; every rank calls it."""
        found, faults = self._newest()
        if found is None and faults:
            raise CheckpointError(f"no checkpoint in {self.folder} is intact: {shown(faults)}")
        return found

    def _newest(self) -> tuple[Found | None, list[str]]:
        self.wait()
        damaged: list[str] = []
        for step in reversed(self._from_first(self.steps())):
            faults = self._faults(self._path(step))
            if not faults:
                note = f"went back to step {step}, because {shown(damaged)}" if damaged else ""
                return Found(step, self._path(step), note), damaged
            damaged.append(f"{folder_of(step)} is damaged: {shown(faults)}")
        return None, damaged

    def _faults(self, path: Path) -> list[str]:
        """Defects of a checkpoint; each rank validates some of its files."""
        try:
            manifest = Manifest.read(path)
            mine = manifest.faults(path, sorted(manifest.files)[self._rank :: self._ranks])
        except CheckpointError as error:
            mine = [str(error).removeprefix(f"{path}: ")]
        return list(dict.fromkeys(fault for theirs in self._from_all(mine) for fault in theirs))

    def load(self, trainer: Trainer, which: int | str = "newest") -> Restored:
        """Load a checkpoint into the trainer: the newest valid one, or that of a step; every rank calls it."""
        found = self._found(which)
        manifest = Manifest.read(found.path)
        self._require_model(manifest, trainer, found.path)
        try:
            extra = Restoration(trainer, found.path, manifest).run()
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError, RecursionError) as error:
            if isinstance(error, UnisonoError):
                raise
            raise CheckpointError(
                f"the checkpoint {found.path} cannot be loaded ({type(error).__name__}: {str(error)[:200]}); was it "
                "saved by another version of unisono, torch or the optimizer?"
            ) from error
        return Restored(found.step, manifest.data, manifest.plan, extra, found.note)

    def _found(self, which: int | str) -> Found:
        if which == "newest":
            found = self.newest_good()
            if found is None:
                raise CheckpointError(f"there is no checkpoint in {self.folder}{_hint(self.folder)}")
            return found
        if isinstance(which, str):
            raise UsageError(f"which={which!r}; expected 'newest' or a step")
        self.wait()
        known = self._from_first(self.steps())
        if which not in known:
            there = f"it has {', '.join(map(str, known))}" if known else "it has none"
            raise CheckpointError(f"there is no checkpoint of step {which} in {self.folder}: {there}")
        faults = self._faults(self._path(which))
        if faults:
            raise CheckpointError(f"the checkpoint {self._path(which)} is damaged: {shown(faults)}")
        return Found(which, self._path(which), "")

    def require_same_model(self, trainer: Trainer) -> None:
        """Check that checkpoints in the folder are of this model: saving would replace those of another."""
        for step in reversed(self._from_first(self.steps())):
            try:
                manifest = Manifest.read(self._path(step))
            except CheckpointError:
                continue
            self._require_model(manifest, trainer, self._path(step))
            return

    def _require_model(self, manifest: Manifest, trainer: Trainer, path: Path) -> None:
        found = differences(manifest.model, _shapes(trainer))
        if found:
            raise CheckpointError(
                f"the checkpoint {path} is of another model: {shown(found)}; use another folder, or that model"
            )

    # ---- among ranks ---------------------------------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        """Looked up in each call: the world may be joined after this object was made."""
        return world.rank()

    @property
    def _ranks(self) -> int:
        return world.world_size()

    def _path(self, step: int) -> Path:
        return path_of(self.folder, step)

    def _from_first(self, value: Any) -> Any:
        """The value of rank 0."""
        return world.world().broadcast_object(value, only_data=True) if self._ranks > 1 else value

    def _from_all(self, value: Any) -> list[Any]:
        return world.world().all_gather_object(value, only_data=True) if self._ranks > 1 else [value]


def _hint(folder: Path) -> str:
    """The folder that the user may have meant."""
    inside = folder / "checkpoints"
    if steps_in(inside):
        return f"; the checkpoints of that run are in {inside}"
    if (folder / MANIFEST).exists():
        return f", which is a checkpoint itself: give its parent, {folder.parent}"
    return "" if folder.is_dir() else ": the folder does not exist"


def _shapes(trainer: Trainer) -> Shapes:
    """Of the full model, also under pipeline parallelism."""
    mine = shapes_here(trainer)
    if trainer.mesh.size("pp") == 1:
        return mine
    full: Shapes = {}
    for theirs in trainer.mesh.comm("pp").all_gather_object(mine, only_data=True):
        full.update(theirs)
    return full
