"""The check of `--check`: before a collective runs, every rank says which one it is about to run.

The first rank of a group to come to its n-th collective leaves a description of it in the store; each rank that comes
later compares its own with that, and stops when they differ. Nobody waits for anybody, so whatever order of calls the
backend allows between groups, the check allows too; and as nobody starts a collective that differs from one already
described, the backend never sees the two together. This costs two exchanges with the store for every collective.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from unisono.comm.log import UNEVEN, Log, describe
from unisono.errors import HangError


class Check:
    """Compares the next collective of this rank with that of the other ranks of the group."""

    def __init__(self, store: dist.Store, disagreed: Callable[[str, int], HangError]) -> None:
        """`disagreed` takes the group and the number of a collective and gives what to raise."""
        self._store = store
        self._disagreed = disagreed

    def agree(self, log: Log) -> None:
        """Return when no rank of the log's group is about to run another collective than this one; else raise."""
        number = log.count
        key = f"{log.group}/{number}"
        mine = self.fingerprint(log)
        if self._store.compare_set(key, "", mine).decode() != mine:
            raise self._disagreed(log.group, number)
        if self._store.add(f"{key}/came", 1) == len(log.ranks):
            self._store.delete_key(key)
            self._store.delete_key(f"{key}/came")

    @staticmethod
    def fingerprint(log: Log) -> str:
        """What must be equal on all ranks of the next collective."""
        raw = log.raw(log.count)
        assert raw
        _, op, detail, shape, dtype = raw[:5]
        if shape is None or dtype is None:
            return f"{op} {detail}"
        if UNEVEN in detail:
            return f"{op} {detail} {dtype} {len(shape)}"
        return f"{op} {detail} {describe(shape, dtype)}"
