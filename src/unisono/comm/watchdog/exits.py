"""Exits: which ranks have left the world, as ranks report it to each other through the store.

A rank that leaves announces it, and how many operations it has begun. One that died is noticed by its neighbour, if
they share a host. Ranks that are blocked in an operation with it then need not wait for the timeout.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from types import FrameType

import torch.distributed as dist

from unisono.comm.watchdog import crash_note
from unisono.comm.watchdog.op_log import OpLog
from unisono.launch.worker.stacks import Frame

_ROOTED = re.compile(r"(torch\.distributed\.)?(broadcast|reduce(?!_scatter)|gather|scatter)")
ANY_SOURCE = "recv from any rank"
_NAMED_RANKS = re.compile(r"\branks? (\d+(?:,\d+)*)$")  # as in: send to rank 1, exchange with ranks 0,2


class Exits:
    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._neighbour: str | None = None  # its address
        self._first: str | None = None  # that of rank 0, which may hold the store

    def give_address(self, address: str) -> None:
        """Publish where this rank's crash note is."""
        self._store.set(f"note/{self._rank}", address)

    def announce(self, words: str, logs: Iterable[OpLog]) -> None:
        """This rank leaves; `words` are for reports. An earlier announcement for the rank stays."""
        self._store.set(f"begun/{self._rank}", json.dumps({log.group: log.entered for log in logs}))
        self._announce(self._rank, words)

    def _announce(self, rank: int, words: str) -> None:
        if self.words_of(rank) is None:
            self._store.set(f"left/{rank}", words)
        self._store.set("left", str(rank))

    def await_others(self, timeout: float) -> None:
        """Wait until all others have left as well, or the timeout: they compare their logs through the store first."""
        deadline = time.monotonic() + timeout
        others = [f"left/{rank}" for rank in range(self._size) if rank != self._rank]
        while not self._store.check(others) and time.monotonic() < deadline:
            time.sleep(0.002)

    def _came_to(self, rank: int, group: str, number: int) -> bool | None:
        """Whether a rank that has left had begun that operation; None where it died."""
        key = f"begun/{rank}"
        return json.loads(self._store.get(key)).get(group, 0) >= number if self._store.check([key]) else None

    def words_of(self, rank: int) -> str | None:
        """How a rank has left; None where it has not."""
        return self._store.get(f"left/{rank}").decode() if self._store.check([f"left/{rank}"]) else None

    def fate(self, rank: int) -> str | None:
        """What became of a rank that does not answer, as far as this host knows."""
        key = f"note/{rank}"
        return crash_note.fate(self._store.get(key).decode()) if self._store.check([key]) else None

    def stack(self, rank: int) -> list[Frame]:
        """Where a rank on this host is that does not answer by itself; empty where that is not known."""
        key = f"note/{rank}"
        return crash_note.stack(self._store.get(key).decode()) if self._store.check([key]) else []

    def fate_of_first(self) -> str:
        """What became of rank 0, without a request to the store."""
        return (self._first and crash_note.fate(self._first)) or crash_note.NO_ANSWER

    def check_neighbour(self) -> None:
        """Announce the death of the rank before this one, where it died without an announcement."""
        before = (self._rank - 1) % self._size
        if self._neighbour is None and self._store.check([f"note/{before}"]):
            self._neighbour = self._store.get(f"note/{before}").decode()
        if self._first is None and self._store.check(["note/0"]):
            self._first = self._store.get("note/0").decode()
        if self._neighbour is not None:
            fate = crash_note.fate(self._neighbour)
            if fate is not None and fate.startswith(crash_note.DIED) and self.words_of(before) is None:
                self._announce(before, fate)

    def concern(self, logs: Iterable[OpLog], torch_frame: FrameType | None, awaited: Iterable[int]) -> bool:
        """Whether this rank, blocked as it is, waits for one that has left; for `awaited` it does in any case."""
        if not self._store.check(["left"]):
            return False
        if self._any_left(awaited):
            return True
        if any(self._waits_in_vain(log) for log in logs if log.pending):
            return True
        return torch_frame is not None and self._any_left(_awaited_by_torch(torch_frame, self._size))

    def _waits_in_vain(self, log: OpLog) -> bool:
        record = log.record(log.pending)
        if record is None or not log.is_p2p:
            is_rooted = record is not None and is_of_one_root(record[1])
            gone = [rank for rank in log.ranks if rank != self._rank and self.words_of(rank) is not None]
            came = [self._came_to(rank, log.group, log.pending) for rank in gone]
            return not all(is_rooted if each is None else each for each in came)
        if record[1] == ANY_SOURCE:
            return all(self.words_of(rank) is not None for rank in log.ranks if rank != self._rank)
        named = _NAMED_RANKS.search(record[1])
        return self._any_left([log.ranks[int(peer)] for peer in named[1].split(",")] if named else log.ranks)

    def _any_left(self, ranks: Iterable[int]) -> bool:
        return any(self.words_of(rank) is not None for rank in ranks if rank != self._rank)


def is_of_one_root(op: str) -> bool:
    """Whether ranks may be done with a collective, and leave, that others still wait in."""
    return _ROOTED.match(op) is not None


def _awaited_by_torch(frame: FrameType, size: int) -> Iterable[int]:
    """The ranks that a call of torch.distributed waits for, by what it was given."""
    given = frame.f_locals
    peers = [given[name] for name in ("src", "dst") if isinstance(given.get(name), int)]
    if peers and frame.f_code.co_name in ("send", "recv"):
        return peers
    if is_of_one_root(frame.f_code.co_name):
        return ()
    group = given.get("group")
    return dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else range(size)
