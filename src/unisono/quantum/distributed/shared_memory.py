"""Shared memory between the ranks of a host: a block is packed by one rank and unpacked by the other, and no message is
sent.

Each rank has a file in memory: counters of how often it has come to meet each other rank, beside them a number that all
add up, then two slots. Files lose
their names as soon as everyone has them open, so nothing is left behind, however the ranks end. Where any of this
fails, blocks travel as messages.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import secrets
import time
import weakref
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.comm.communicator import Communicator

_FOLDER = "/dev/shm"
SLOTS = 2
_LINE = 64  # bytes; counters and slots have cache lines of their own
_LOOKS = 20_000  # at a counter, while a partner may come soon: some milliseconds
_NAP = 0.0005  # seconds between looks, when it does not
_ROUND = 0.25  # seconds between questions whether the partner is still alive
_kept: weakref.WeakKeyDictionary[Communicator, SharedStaging | None] = weakref.WeakKeyDictionary()


class SharedStaging:
    """The slots of the ranks on this host, by rank."""

    def __init__(self, comm: Communicator, maps: dict[int, mmap.mmap], pids: list[int], slot: int) -> None:
        self._comm = weakref.proxy(comm)
        self._maps = maps
        self._pids = pids
        self._met: Counter[int] = Counter()
        self._rank = comm.rank
        self._begin = _LINE * comm.size
        self._counters: dict[int, NDArray[np.int64]] = {
            rank: np.frombuffer(each, np.int64, self._begin // 8) for rank, each in maps.items()
        }
        self._cells = {rank: counters.view(np.float64) for rank, counters in self._counters.items()}
        self._sums = 0
        self.has_all = len(maps) == comm.size
        self.slot = slot  # bytes

    def reaches(self, rank: int) -> bool:
        return rank in self._maps

    def chunk_of(self, rank: int, number: int, like: torch.Tensor) -> torch.Tensor:
        """A rank's slot, as a tensor like another."""
        start = self._begin + (number % SLOTS) * self.slot
        flat = torch.frombuffer(self._maps[rank], dtype=like.dtype, count=like.numel(), offset=start)
        return flat.view(like.shape)

    def exchange_blocks(self, chunks: Iterator[torch.Tensor], partner: int) -> None:
        """Exchange chunks with a partner, who has chunks of the same shapes.

        A slot is packed again only when the partner has come to the chunk after: then it has unpacked this one."""
        for number, chunk in enumerate(chunks):
            self.chunk_of(self._rank, number, chunk).copy_(chunk)
            self._meet(partner)
            chunk.copy_(self.chunk_of(partner, number, chunk))
        self._meet(partner)

    def borrow(self, chunks: Iterator[tuple[int, torch.Tensor]], partner: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The partner's chunks, where it put them, while it looks at this rank's; a slot is free as in
        `exchange_blocks`."""
        for number, (offset, chunk) in enumerate(chunks):
            self.chunk_of(self._rank, number, chunk).copy_(chunk)
            self._meet(partner)
            yield offset, self.chunk_of(partner, number, chunk)
        self._meet(partner)

    def total(self, value: float) -> float:
        """The sum over all ranks, which are all on this host.

        A cell is written again two sums later, when everyone has come to the sum between, and so has read this one."""
        self._sums += 1
        cell = 1 + self._sums % 2
        self._cells[self._rank][_LINE // 8 * self._rank + cell] = value
        for partner in range(self._comm.size):
            if partner != self._rank:
                self._meet(partner)
        return float(sum(self._cells[rank][_LINE // 8 * rank + cell] for rank in range(self._comm.size)))

    def _meet(self, partner: int) -> None:
        """Wait until the partner has come here as often as this rank has."""
        from unisono.quantum.kernels.cpu import advance, reached

        self._met[partner] += 1
        advance(self._counters[self._rank], _LINE // 8 * partner)
        theirs, goal = (self._counters[partner], _LINE // 8 * self._rank), self._met[partner]
        if not reached(*theirs, goal, _LOOKS):
            self._comm.block(f"exchange with rank {partner}", lambda: self._wait(partner, goal))

    def _wait(self, partner: int, goal: int) -> None:
        from unisono.quantum.kernels.cpu import reached

        asked = time.monotonic()
        while not reached(self._counters[partner], _LINE // 8 * self._rank, goal, 1):
            time.sleep(_NAP)
            if time.monotonic() > asked + _ROUND:
                asked = time.monotonic()
                if not _alive(self._pids[partner]):
                    raise RuntimeError(f"rank {partner} has ended")


def staging(comm: Communicator, size: int) -> SharedStaging | None:
    """The staging of a communicator, made when it is first asked for, by all ranks; None: there is none.

    `size` are the bytes of a rank's slots together."""
    slot = max(_LINE, size // SLOTS // _LINE * _LINE)
    found = _kept.get(comm)
    if comm not in _kept or (found is not None and found.slot < slot):
        _kept[comm] = _made(comm, slot)
    return _kept[comm]


def known(comm: Communicator) -> SharedStaging | None:
    """The staging that a communicator has already."""
    return _kept.get(comm)


def _made(comm: Communicator, slot: int) -> SharedStaging | None:
    here = [rank for rank in range(comm.size) if comm.hosts[rank] == comm.hosts[comm.rank]]
    gathered = comm.all_gather_object((f"{_FOLDER}/unisono-{secrets.token_hex(8)}", os.getpid()), only_data=True)
    names, pids = [name for name, _ in gathered], [pid for _, pid in gathered]
    maps = _opened(comm, names, here, _LINE * comm.size + SLOTS * slot)
    able = maps is not None and importlib.util.find_spec("numba") is not None and all(_alive(pids[r]) for r in here)
    everyone = torch.tensor([able], dtype=torch.uint8)
    comm.all_reduce(everyone, op="min")
    if os.path.exists(names[comm.rank]):
        os.unlink(names[comm.rank])
    return SharedStaging(comm, maps, pids, slot) if maps is not None and int(everyone) else None


def _opened(comm: Communicator, names: list[str], here: list[int], size: int) -> dict[int, mmap.mmap] | None:
    """Everyone makes its file, then opens the others': both halves happen on all ranks, whether or not they succeed."""
    try:
        made = os.open(names[comm.rank], os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        os.posix_fallocate(made, 0, size)  # a full folder is an error here, not a crash at the first write
        os.close(made)
    except (OSError, AttributeError):  # no such folder, no room in it, no such system
        size = -1
    comm.barrier()
    maps = {}
    try:
        for rank in here:
            file = os.open(names[rank], os.O_RDWR)
            maps[rank] = mmap.mmap(file, size)
            os.close(file)
    except (OSError, ValueError, OverflowError):
        return None
    return maps


def _alive(pid: int) -> bool:
    """Whether the process runs: containers that share memory may not see each other's processes."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs, as another user
        pass
    return True
