"""Shared memory between the ranks of a host: a block is packed by one rank and unpacked by the other, with no message
between but a token.

Each rank has a file in memory with two slots. Files lose their names as soon as everyone has them open, so nothing is
left behind, however the ranks end. Where any of this fails, blocks travel as messages.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from collections.abc import Iterator

import torch

from unisono.comm.communicator import Communicator

_FOLDER = "/dev/shm"
SLOTS = 2
_LINE = 64  # bytes; slots begin at cache lines
_kept: weakref.WeakKeyDictionary[Communicator, Staging | None] = weakref.WeakKeyDictionary()


class Staging:
    """The slots of the ranks on this host, by rank."""

    def __init__(self, comm: Communicator, maps: dict[int, mmap.mmap], slot: int) -> None:
        self._comm = weakref.proxy(comm)
        self._maps = maps
        self.slot = slot  # bytes

    def reaches(self, rank: int) -> bool:
        return rank in self._maps

    def place(self, rank: int, number: int, like: torch.Tensor) -> torch.Tensor:
        """A rank's slot, as a tensor like another."""
        start = (number % SLOTS) * self.slot
        flat = torch.frombuffer(self._maps[rank], dtype=like.dtype, count=like.numel(), offset=start)
        return flat.view(like.shape)

    def trade(self, pieces: Iterator[torch.Tensor], partner: int) -> None:
        """Trade pieces with a partner, who has pieces of the same shapes.

        A slot is packed again only when the partner has come to the piece after: then it has unpacked this one."""
        for number, piece in enumerate(pieces):
            self.place(self._comm.rank, number, piece).copy_(piece)
            self._meet(partner)
            piece.copy_(self.place(partner, number, piece))
        self._meet(partner)

    def borrow(self, pieces: Iterator[tuple[int, torch.Tensor]], partner: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The partner's pieces, where it put them, while it looks at this rank's; `trade` says when a slot is free."""
        for number, (place, piece) in enumerate(pieces):
            self.place(self._comm.rank, number, piece).copy_(piece)
            self._meet(partner)
            yield place, self.place(partner, number, piece)
        self._meet(partner)

    def _meet(self, partner: int) -> None:
        token, theirs = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        self._comm.exchange([(token, partner)], [(theirs, partner)])


def staging(comm: Communicator, size: int) -> Staging | None:
    """The staging of a communicator, made when it is first asked for, by all ranks; None: there is none.

    `size` are the bytes of a rank's slots together."""
    slot = max(_LINE, size // SLOTS // _LINE * _LINE)
    found = _kept.get(comm)
    if comm not in _kept or (found is not None and found.slot < slot):
        _kept[comm] = _made(comm, slot)
    return _kept[comm]


def _made(comm: Communicator, slot: int) -> Staging | None:
    here = [rank for rank in range(comm.size) if comm.hosts[rank] == comm.hosts[comm.rank]]
    names = comm.all_gather_object(f"{_FOLDER}/unisono-{secrets.token_hex(8)}")
    maps = _opened(comm, names, here, SLOTS * slot)
    everyone = torch.tensor([maps is not None], dtype=torch.uint8)
    comm.all_reduce(everyone, op="min")
    if os.path.exists(names[comm.rank]):
        os.unlink(names[comm.rank])
    return Staging(comm, maps, slot) if maps is not None and int(everyone) else None


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
