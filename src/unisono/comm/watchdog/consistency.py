"""The consistency check: do all ranks of a group run the same operations?

A collective is described by a `Signature`: its kind, what it is given (root, reduction), the tensor's dtype and length.
Signatures of the same number must agree on all ranks of a group. They are compared twice:

- With `--check`, before each collective starts (`agree`). The first rank to reach a group's n-th collective leaves its
  signature in the store; later ones compare theirs with it, and stop when they differ. No rank waits for another, so
  collectives of different groups may cross; no mismatched collective ever starts. The price is two requests to the
  store per collective. The user's own torch.distributed calls are wrapped and compared too (`TorchCalls`).
- Always, about once a second and when a rank leaves (`difference`). The watchdog's thread leaves the log's signatures
  in the store and compares them with the neighbour's, since a backend may let a mismatch pass: MPI may drop what is too
  long for one rank's tensor and report success. The rank's main thread takes no part in it until it leaves.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from unisono.comm.watchdog import report
from unisono.comm.watchdog.op_log import UNEVEN, LoggedOp, OpLog, Record
from unisono.errors import HangError
from unisono.torch_patches import PatchSet, original


class Signature(NamedTuple):
    """What must be equal on all ranks in a collective."""

    op: str
    detail: str
    dtype: str
    dims: int
    elements: int | None  # None: no tensor, or shapes may differ between ranks

    @classmethod
    def of(cls, record: Record) -> Signature:
        _, op, detail, shape, dtype = record[:5]
        is_even = shape is not None and UNEVEN not in detail
        elements = math.prod(shape) if is_even and shape is not None else None
        family = op.removesuffix("_into")
        return cls(family, detail.replace(UNEVEN, ""), str(dtype or ""), len(shape or ()), elements)

    def differs(self, other: Signature) -> bool:
        """Whether two ranks cannot have meant the same collective; the shapes of equal lengths may differ."""
        return self[:3] != other[:3] or (None not in (self[4], other[4]) and self[4] != other[4])


class Mismatch(NamedTuple):
    dispute: report.Dispute
    report: str  # made of what ranks have left in the store


Recent = dict[int, tuple[Signature, LoggedOp]]  # by number


class Consistency:
    """Compares the operations of this rank with those of others, through the store."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, logs: Sequence[OpLog], disagreed: Callable[[str, int], HangError]
    ) -> None:
        """The list of logs may grow. `disagreed` takes a group and a number and gives what `agree` raises."""
        self._store = store
        self._rank = rank
        self._logs = logs
        self._disagreed = disagreed
        self._period = 1.0 + size / 500  # seconds; thousands of ranks must not crowd their store
        self._next = self._next_time()
        self._left: dict[str, int] = {}  # how many operations of a group this rank has left in the store

    def agree(self, log: OpLog, store: dist.Store) -> None:
        """Return when no rank of the log's group is about to run another collective than this one; else raise.

        `store` is the main thread's connection.
        """
        record = log.record(log.entered)
        assert record is not None
        key = f"{log.group}/{log.entered}"
        mine = json.dumps([*Signature.of(record), list(record[3] or ()) if UNEVEN not in record[2] else None])
        if store.compare_set(key, "", mine).decode() != mine:
            raise self._disagreed(log.group, log.entered)
        if store.add(f"{key}/came", 1) == len(log.ranks):
            store.delete_key(key)
            store.delete_key(f"{key}/came")

    def _next_time(self) -> float:
        """The next one that is common to all ranks whose clocks agree."""
        return (math.floor(time.time() / self._period) + 1) * self._period

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._next - time.time())

    def difference(self) -> Mismatch | None:
        """The first difference from the neighbour; None where there is none, or the period is not over."""
        if self.seconds_left:
            return None
        self._next = self._next_time()
        return self._compare(neighbours=(-1,))

    def last_difference(self) -> Mismatch | None:
        """As this rank leaves. Of two neighbours the one that leaves later finds what the other has left."""
        return self._compare(neighbours=(-1, 1))

    def _compare(self, neighbours: Sequence[int]) -> Mismatch | None:
        taken = [(log, recent(log)) for log in self._logs if log.entered and not log.is_p2p]
        for log, mine in taken:
            if self._left.get(log.group) != log.entered:
                self._left[log.group] = log.entered
                self._store.set(_key(log.group, self._rank), json.dumps(mine))
        for log, mine in taken:
            numbers = [number for step in neighbours for number in self._differing(log, mine, step)]
            if numbers:
                return Mismatch((log.group, min(numbers)), self._report(log, mine, min(numbers)))
        return None

    def _differing(self, log: OpLog, mine: Recent, step: int) -> Iterator[int]:
        other = log.ranks[(log.ranks.index(self._rank) + step) % len(log.ranks)]
        theirs = self._read(log.group, other) if other != self._rank else {}
        return (number for number in mine.keys() & theirs.keys() if mine[number][0].differs(theirs[number][0]))

    def _read(self, group: str, rank: int) -> Recent:
        key = _key(group, rank)
        data: dict[str, Any] = json.loads(self._store.get(key)) if self._store.check([key]) else {}
        return {int(number): (Signature(*one), LoggedOp(*shown)) for number, (one, shown) in data.items()}

    def _report(self, log: OpLog, mine: Recent, number: int) -> str:
        known: dict[int, Recent] = {self._rank: mine}
        deadline = time.monotonic() + 3 * self._period  # on a busy machine ranks may miss a moment
        while len(known) < len(log.ranks) and time.monotonic() < deadline:  # others get there later
            for rank in set(log.ranks) - known.keys():
                theirs = self._read(log.group, rank)
                if number in theirs:
                    known[rank] = theirs
            time.sleep(0.02)
        groups: list[tuple[Signature, LoggedOp, list[int]]] = []
        for rank in sorted(known):
            signature, entry = known[rank][number]
            alike = next((ranks for first, _, ranks in groups if not signature.differs(first)), None)
            if alike is None:
                groups.append((signature, entry, [rank]))
            else:
                alike.append(rank)
        where = "" if log.group == "world" else f" in the group of ranks {','.join(map(str, log.ranks))}"
        return report.report_difference([(entry, ranks) for _, entry, ranks in groups], where)


def recent(log: OpLog) -> Recent:
    """What the log still has. Any thread may ask."""
    return {record[0]: (Signature.of(record), LoggedOp.of(record)) for record in list(log.ring)}


def _key(group: str, rank: int) -> str:
    return f"recent/{group}/{rank}"


# ---- the user's own torch.distributed calls ------------------------------------------------------------------------

_INSIDE = (
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
    os.path.dirname(torch.__file__),
)
_UNEVEN = ("all_gather", "gather", "all_to_all", "all_to_all_single")  # shapes may differ between ranks
_NAMES = (
    *("all_reduce", "broadcast", "reduce", "scatter", "barrier", "reduce_scatter", "reduce_scatter_tensor"),
    *("reduce_scatter_single", "all_gather_into_tensor", "all_gather_single"),
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *_UNEVEN,
)
_ROOTS = ("src", "dst", "group_src", "group_dst")


class TorchCalls:
    """Wraps torch.distributed's collectives for `--check`, as long as the world lasts.

    Calls by unisono and by torch itself pass through: unisono checks its own, torch's are its own business.
    """

    def __init__(self, log_of: Callable[[dist.ProcessGroup], OpLog], agree: Callable[[OpLog], None]) -> None:
        self._log_of = log_of
        self._agree = agree
        calls = {name: self._wrapped(name, original(dist, name)) for name in _NAMES if hasattr(dist, name)}
        self._patches = PatchSet(
            {
                (home, name): call
                for name, call in calls.items()
                for home in (dist, distributed_c10d)
                if hasattr(home, name)
            },
            why="the user's own collectives are compared between ranks",
            until="the world ends",
        )

    def wrap(self) -> None:
        self._patches.enter()

    def unwrap(self) -> None:
        self._patches.leave()

    def _wrapped(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(own)

        def call(*arguments: Any, **options: Any) -> Any:
            caller = sys._getframe(2)  # of the patched function, which calls this one
            if caller.f_code.co_filename.startswith(_INSIDE):
                return own(*arguments, **options)
            given = signature.bind(*arguments, **options).arguments
            group: Any = given.get("group")
            if group is dist.GroupMember.NON_GROUP_MEMBER:
                return own(*arguments, **options)
            if group is None:
                group = dist.group.WORLD
            log = self._log_of(group)
            tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
            tensor = tensors[0] if tensors and "object" not in name else None
            log.enter(f"torch.distributed.{name}", _detail(name, given), tensor, caller)
            try:
                self._agree(log)
                return own(*arguments, **options)
            finally:
                log.left = log.entered

        return call


def _detail(name: str, given: dict[str, Any]) -> str:
    """What must be equal on all ranks beside the tensor."""
    words = [UNEVEN] if name in _UNEVEN else []
    op = given.get("op")
    if op is not None and op != dist.ReduceOp.SUM:
        words.append(str(op).rsplit(".", maxsplit=1)[-1].lower())
    words += [f"root={given[root]}" for root in _ROOTS if given.get(root)]
    return " ".join(words)
