"""Checkpoints in memory: hot spares, from which a job goes on after the loss of a rank or of a host.

Each rank writes its part to its host's shared memory, which outlives the rank, and a copy to that of the next host, so
that the loss of any one host loses nothing:

    UNISONO_MEMORY/<host>/step-<step>/      the files of this host's ranks and of those of the host before it
                                            manifest.json: on every host the same

The launcher names the folder and removes it when the job ends; restarts find it. Saving returns when all is written.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import world
from unisono.errors import CheckpointError, UsageError
from unisono.launch import environment
from unisono.parallel.trainer import Trainer
from unisono.train.checkpoint.checkpoints import Checkpoints, Found
from unisono.train.checkpoint.inventory import Inventory
from unisono.train.checkpoint.manifest import NAME as MANIFEST
from unisono.train.checkpoint.manifest import Manifest, merged
from unisono.train.checkpoint.saving import (
    Saving,
    Target,
    delete_old,
    folder_of,
    remove_leftovers,
    replace_folder,
    steps_in,
)

_KEEP = 2  # while a host writes a step, the others may have published only the one before
_ABANDONED = 600.0  # seconds after which memory that no process holds is that of a job whose processes were all killed
_HELD = "held"


class MemoryCheckpoints(Checkpoints):
    """The checkpoints of this job in the memory of its hosts."""

    def __init__(self) -> None:
        given = os.environ.get(environment.MEMORY)
        if given is None:
            raise UsageError(
                "checkpoints in memory need a launcher that keeps the memory while ranks restart: start with "
                "`unisono run --max-restarts K`, or give the path of a folder, save='runs/x'"
            )
        self._comm: Communicator = world.world()
        hosts = list(dict.fromkeys(self._comm.hosts))
        self._groups = [[rank for rank, host in enumerate(self._comm.hosts) if host == name] for name in hosts]
        self._here = hosts.index(self._comm.hosts[self._comm.rank])
        super().__init__(Path(given) / hosts[self._here], keep=_KEEP)
        if self._is_first_here:
            remove_abandoned(Path(given))
        weakref.finalize(self, os.close, hold(Path(given)))

    @property
    def _is_first_here(self) -> bool:
        return self._comm.rank == self._groups[self._here][0]

    def _partner(self, rank: int, host: int) -> int:
        """The rank of the next host that keeps a copy of what `rank` of `host` writes."""
        there = self._groups[(host + 1) % len(self._groups)]
        return there[self._groups[host].index(rank) % len(there)]

    # ---- saving --------------------------------------------------------------------------------------------------

    def require_same_model(self, trainer: Trainer) -> None:
        """The memory is of this job alone."""

    def _begin(self, trainer: Trainer, step: int, data_state: Any, inventory: Inventory, wait: bool) -> None:
        comm = self._comm
        if not self._token:
            if self._is_first_here:
                remove_leftovers(self.folder)
            self._token = "memory"
            comm.barrier()
        target = Target(self.folder, step, self._token, comm.rank, comm.size)
        tensors = [entry.tensor[chunk.slices] for entry in inventory.entries for chunk in entry.written]
        saving = Saving(target, inventory, tensors, {}, None)
        saving.write()
        index = target.temporary / target.name(comm.rank, "json")
        part = None if saving.write_error else json.loads(index.read_text(encoding="utf-8"))
        written = comm.all_gather_object((saving.write_error, part), only_data=True)
        self._require(step, [error for error, _ in written], target)
        parts = [each for _, each in written]
        if len(self._groups) > 1:
            error = self._replicate(target, [each["bytes"] for each in parts])
            self._require(step, comm.all_gather_object(error, only_data=True), target)
        if self._is_first_here:
            about = {"step": step, "plan": str(trainer.plan), "ranks": comm.size, "seed": trainer.random.seed}
            merged(parts, data=data_state, **about).write(target.temporary)
            for left in target.temporary.glob("*.json"):
                if left.name != MANIFEST:
                    left.unlink()
            replace_folder(target.temporary, target.published)
            delete_old(self.folder, _KEEP, step)

    def _replicate(self, target: Target, sizes: Sequence[int]) -> str | None:
        """Send this rank's file to its partner on the next host, and write those that arrive; the error, if any."""
        comm = self._comm
        before = (self._here - 1) % len(self._groups)
        sources = [rank for rank in self._groups[before] if self._partner(rank, before) == comm.rank]
        own = _read(target.temporary / target.name(comm.rank, "safetensors")).to(comm.device)
        arriving = [torch.empty(sizes[rank], dtype=torch.uint8, device=comm.device) for rank in sources]
        comm.exchange([(own, self._partner(comm.rank, self._here))], list(zip(arriving, sources, strict=True)))
        try:
            for rank, content in zip(sources, arriving, strict=True):
                _write(target.temporary / target.name(rank, "safetensors"), content)
        except OSError as error:
            return f"{error.strerror or error} ({target.temporary})"
        return None

    def _require(self, step: int, errors: Sequence[str | None], target: Target) -> None:
        failures = {rank: error for rank, error in enumerate(errors) if error is not None}
        if failures:
            shutil.rmtree(target.temporary, ignore_errors=True)
            rank, first = min(failures.items())
            raise CheckpointError(
                f"the checkpoint of step {step} was not saved in memory: rank {rank}: {first}; give the hosts more "
                "shared memory (docker: --shm-size), or save to a folder"
            )

    # ---- loading -------------------------------------------------------------------------------------------------

    def newest_good(self) -> Found | None:
        """The newest step of which the hosts that are left have every file; afterwards each of them has all."""
        there = self._comm.all_gather_object(self._intact(), only_data=True)
        holders: dict[tuple[int, str], list[int]] = {}  # by step and file: the ranks that see it
        for rank, steps in enumerate(there):
            for step, _, _, intact in steps:
                for name in intact:
                    holders.setdefault((step, name), []).append(rank)
        known = [each for steps in there for each in steps]
        for step, text, sizes, _ in sorted(known, key=lambda each: each[0], reverse=True):
            if all((step, name) in holders for name in sizes):
                self._complete(step, text, sizes, {name: holders[step, name] for name in sizes})
                return Found(step, self._path(step), "")
        return None

    def _intact(self) -> list[tuple[int, str, dict[str, int], list[str]]]:
        """Steps that are here: the manifest's text, the sizes of its files, and those of them that match it, of which
        this rank looks at some."""
        mine = self._groups[self._here]
        found = []
        for step in steps_in(self.folder):
            with contextlib.suppress(CheckpointError, OSError):
                manifest = Manifest.read(self._path(step))
                names = sorted(manifest.files)[mine.index(self._comm.rank) :: len(mine)]
                intact = [name for name in names if not manifest.faults(self._path(step), [name])]
                text = (self._path(step) / MANIFEST).read_text(encoding="utf-8")
                found.append((step, text, {name: about["bytes"] for name, about in manifest.files.items()}, intact))
        return found

    def _complete(self, step: int, text: str, sizes: dict[str, int], holders: dict[str, list[int]]) -> None:
        """Bring every file to each host that lacks it."""
        comm, folder = self._comm, self.folder / folder_of(step)
        error = None
        for name in sorted(sizes):
            having = {self._host_of(rank) for rank in holders[name]}
            if len(having) == len(self._groups):
                continue
            root = holders[name][0]
            content = torch.empty(sizes[name], dtype=torch.uint8)
            if comm.rank == root:
                content = _read(folder / name)
            content = content.to(comm.device)
            comm.broadcast(content, root)
            if self._is_first_here and self._here not in having and error is None:
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    _write(folder / name, content)
                    (folder / MANIFEST).write_text(text, encoding="utf-8")
                except OSError as caught:
                    error = f"{caught.strerror or caught} ({folder})"
        failures = [each for each in comm.all_gather_object(error, only_data=True) if each is not None]
        if failures:
            raise CheckpointError(f"step {step} cannot be restored from memory: {failures[0]}")

    def _host_of(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self._groups) if rank in ranks)


def hold(memory: Path) -> int:
    """Keep others from taking the memory for abandoned while this process lives; the descriptor of the lock."""
    memory.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(memory / _HELD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    os.utime(descriptor)
    return descriptor


def remove_abandoned(own: Path) -> None:
    """Remove the memory of this user's jobs of which every process was killed."""
    for other in own.parent.glob(f"{environment.memory_prefix()}*"):
        if other == own:
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(other / _HELD, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(descriptor).st_mtime > _ABANDONED:
                    shutil.rmtree(other, ignore_errors=True)
            finally:
                os.close(descriptor)


def _read(path: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def _write(path: Path, content: torch.Tensor) -> None:
    path.write_bytes(content.cpu().numpy().data)
