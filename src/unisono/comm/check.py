"""The check of `--check`: before a collective runs, every rank says which one it is about to run.

This costs a few exchanges with the store for every collective, and finds the first difference at once instead of at
the timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from unisono.comm.log import Log, describe
from unisono.errors import HangError

POLL = timedelta(milliseconds=20)


class Check:
    """Compares the next collective of this rank with that of the other ranks of the group."""

    def __init__(self, store: dist.Store, rank: int, disagreed: Callable[[], HangError]) -> None:
        self._store = store
        self._rank = rank
        self._disagreed = disagreed

    def agree(self, log: Log) -> None:
        """Return when all ranks of the log's group are about to run the same collective; raise when one differs."""
        number = log.count
        mine = self.fingerprint(log)
        self._store.set(self._key(log, number, self._rank), mine)
        others = [rank for rank in log.ranks if rank != self._rank]
        while others:
            keys = [self._key(log, number, rank) for rank in others]
            try:
                self._store.wait(keys, POLL)
                came = others
            except RuntimeError:
                came = [rank for rank in others if self._store.check([self._key(log, number, rank)])]
                if not came:
                    time.sleep(0.02)
            for rank in came:
                if self._store.get(self._key(log, number, rank)).decode() != mine:
                    raise self._disagreed()
            others = [rank for rank in others if rank not in came]
        # Nobody can be more than one collective behind once all have come to this one.
        if number > 2:
            self._store.delete_key(self._key(log, number - 2, self._rank))

    @staticmethod
    def fingerprint(log: Log) -> str:
        """What must be equal on all ranks of the next collective."""
        raw = log.raw(log.count)
        assert raw
        _, op, detail, shape, dtype = raw[:5]
        if shape is None or dtype is None:
            return f"{op} {detail}"
        if "uneven" in detail:
            return f"{op} {detail} {dtype} {len(shape)}"
        return f"{op} {detail} {describe(shape, dtype)}"

    @staticmethod
    def _key(log: Log, number: int, rank: int) -> str:
        return f"{log.group}/{number}/{rank}"
