"""Checkpoints: a trainer's state on disk, which any other plan can go on from.

    checkpoints = uni.Checkpoints("runs/gpt", keep=3)
    checkpoints.save(trainer, step, loader.state_dict(), wait=False)      # training goes on while it is written
    restored = checkpoints.load(trainer)                                  # under this plan or another
    loader.load_state_dict(restored.data_state)

Every rank calls these alike; the folder is one that all ranks see. Each rank writes, aside, what no other writes; when
all have, the folder is renamed, and only then is it a checkpoint. Whatever fails, the ones before it are untouched.
"""

from __future__ import annotations

import copy
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from unisono.comm.rendezvous import world
from unisono.errors import CheckpointError, UsageError
from unisono.parallel.trainer import Trainer
from unisono.train.inventory import Inventory, Shapes, collect, shapes_here
from unisono.train.manifest import NAME as MANIFEST
from unisono.train.manifest import Manifest, differences, shown
from unisono.train.order import require_whole_number
from unisono.train.restoring import Restoration
from unisono.train.saving import Saving, Target, folder_of, path_of, steps_in, tidy
from unisono.train.staging import Staging

_SETTLING = 30.0  # seconds that a rank which has failed gives to what is being saved


class Found(NamedTuple):
    """A checkpoint that was checked."""

    step: int
    path: Path
    note: str  # what newer ones were passed over, and why; "" if none


@dataclass(frozen=True)
class Restored:
    step: int
    data_state: Any
    plan: str  # that it was saved under
    extra: Any
    note: str


class Checkpoints:
    """The checkpoints in a folder, of which the newest `keep` stay (None: all)."""

    def __init__(self, folder: str | Path, keep: int | None = 3) -> None:
        self.folder = Path(folder)
        self.keep = None if keep is None else require_whole_number("keep", keep, 1)
        self._rank, self._ranks = (world.rank(), world.world_size()) if world.is_initialized() else (0, 1)
        self._staging = Staging()
        self._under_way: Saving | None = None
        self._token = ""  # of this job's saves; none before the first

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.folder)!r}, keep={self.keep})"

    # ---- saving --------------------------------------------------------------------------------------------------

    def save(
        self, trainer: Trainer, step: int, data_state: Any = None, extra: Any = None, *, wait: bool = True
    ) -> None:
        """Save as `step`; extra: numbers, text and tensors in lists and dicts, the same on all ranks.

        wait=False returns when the state is copied to host memory. If writing fails after that, the next `save` or
        `wait` raises it, on every rank.
        """
        require_whole_number("step", step, 0)
        trainer.loss.settle()
        self.wait()
        if not self._token:
            self.require_same_model(trainer)
        self._begin(trainer, step, data_state, collect(trainer, extra), wait)

    def save_weights(self, trainer: Trainer, step: int) -> Path:
        """Save the model without optimizer and generators: enough to export. Every rank calls it."""
        trainer.loss.settle()
        self.wait()
        self._begin(trainer, step, None, collect(trainer, weights_only=True), wait=True)
        return self._path(step)

    def _begin(self, trainer: Trainer, step: int, data_state: Any, inventory: Inventory, wait: bool) -> None:
        if not self._token:  # from now on the folder is this job's to write
            if self._rank == 0:
                tidy(self.folder)
            self._token = self._told(secrets.token_hex(4))
        tensors = [entry.tensor[chunk.slices] for entry in inventory.entries for chunk in entry.written]
        about = {
            "step": step,
            "plan": str(trainer.plan),
            "ranks": self._ranks,
            "seed": trainer.random.seed,
            "data": copy.deepcopy(data_state),  # it may change before it is written
        }
        target = Target(self.folder, step, self._token, self._rank, self._ranks)
        if wait:
            self._under_way = Saving(target, inventory, tensors, about, self.keep)
            self.wait()
        else:
            self._under_way = Saving(target, inventory, self._staging.copied(tensors), about, self.keep)
            self._under_way.start()

    def wait(self) -> None:
        """Until what is being saved is published; every rank calls it, at the latest when training ends."""
        saving, self._under_way = self._under_way, None
        if saving is None:
            return
        failures = {rank: error for rank, error in enumerate(self._from_all(saving.written())) if error is not None}
        if not failures and (error := self._told(saving.published() if self._rank == 0 else None)) is not None:
            failures[0] = error
        if failures:
            if self._rank == 0:
                saving.give_up()
            rank, error = min(failures.items())
            before = "those before it are intact" if steps_in(self.folder) else "there is none before it"
            raise CheckpointError(
                f"the checkpoint of step {saving.target.step} was not saved in {self.folder}: rank {rank}: {error}"
                + (f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else "")
                + f"; {before}"
            )

    def settle(self) -> None:
        """After a failure: let what is being written be written, without a word to other ranks."""
        if self._under_way is not None:
            self._under_way.settle(_SETTLING)

    def steps(self) -> list[int]:
        """Published steps, oldest first; whether they are whole, `newest_good` tells."""
        return steps_in(self.folder)

    # ---- loading -------------------------------------------------------------------------------------------------

    def newest_good(self) -> Found | None:
        """The newest checkpoint of which every byte is as it was written, or None; every rank calls it."""
        found, faults = self._newest()
        if found is None and faults:
            raise CheckpointError(f"no checkpoint in {self.folder} is whole: {shown(faults)}")
        return found

    def _newest(self) -> tuple[Found | None, list[str]]:
        self.wait()
        passed: list[str] = []
        for step in reversed(self._told(self.steps())):
            faults = self._faults(self._path(step))
            if not faults:
                note = f"went back to step {step}, because {shown(passed)}" if passed else ""
                return Found(step, self._path(step), note), passed
            passed.append(f"{folder_of(step)} is damaged: {shown(faults)}")
        return None, passed

    def _faults(self, path: Path) -> list[str]:
        """What is wrong with a checkpoint; ranks share the files."""
        try:
            manifest = Manifest.read(path)
            mine = manifest.faults(path, sorted(manifest.files)[self._rank :: self._ranks])
        except CheckpointError as error:
            mine = [str(error).removeprefix(f"{path}: ")]
        return list(dict.fromkeys(fault for theirs in self._from_all(mine) for fault in theirs))

    def load(self, trainer: Trainer, which: int | str = "newest") -> Restored:
        """Put a checkpoint into the trainer: the newest that is whole, or that of a step; every rank calls it."""
        found = self._found(which)
        manifest = Manifest.read(found.path)
        self._require_model(manifest, trainer, found.path)
        extra = Restoration(trainer, found.path, manifest).run()
        return Restored(found.step, manifest.data, manifest.plan, extra, found.note)

    def _found(self, which: int | str) -> Found:
        if which == "newest":
            found = self.newest_good()
            if found is None:
                raise CheckpointError(f"there is no checkpoint in {self.folder}{_elsewhere(self.folder)}")
            return found
        if isinstance(which, str):
            raise UsageError(f"which={which!r}; expected 'newest' or a step")
        self.wait()
        known = self._told(self.steps())
        if which not in known:
            there = f"those of {', '.join(map(str, known))}" if known else "none"
            raise CheckpointError(f"there is no checkpoint of step {which} in {self.folder}, but {there}")
        faults = self._faults(self._path(which))
        if faults:
            raise CheckpointError(f"the checkpoint {self._path(which)} is damaged: {shown(faults)}")
        return Found(which, self._path(which), "")

    def require_same_model(self, trainer: Trainer) -> None:
        """That what is in the folder, if anything, is of this model: else training would lose one of the two."""
        for step in reversed(self._told(self.steps())):
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
                f"the checkpoint {path} is of another model: {shown(found)}; use another folder, or the model it is of"
            )

    # ---- among ranks ---------------------------------------------------------------------------------------------

    def _path(self, step: int) -> Path:
        return path_of(self.folder, step)

    def _told(self, value: Any) -> Any:
        """What rank 0 says."""
        return world.world().broadcast_object(value) if self._ranks > 1 else value

    def _from_all(self, value: Any) -> list[Any]:
        return world.world().all_gather_object(value) if self._ranks > 1 else [value]


def _elsewhere(folder: Path) -> str:
    """Where the checkpoints are that a user may have meant."""
    inside = folder / "checkpoints"
    if steps_in(inside):
        return f"; those of that run are in {inside}"
    if (folder / MANIFEST).exists():
        return f", which is one itself: give the folder that it is in, {folder.parent}"
    return "" if folder.is_dir() else ": there is no such folder"


def _shapes(trainer: Trainer) -> Shapes:
    """Of the whole model, also where a pipeline has taken it apart."""
    mine = shapes_here(trainer)
    if trainer.mesh.size("pp") == 1:
        return mine
    whole: Shapes = {}
    for theirs in trainer.mesh.comm("pp").all_gather_object(mine):
        whole.update(theirs)
    return whole
