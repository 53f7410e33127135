"""The comparison: what ranks have run, held side by side now and then, for differences that went through unseen.

Without `--check` a difference shows when a rank waits in vain or the backend fails. But a backend may let it pass: one
rank's tensor is longer, and what is left over is lost. So once a second, at the same moment on all ranks, the watch of
each rank leaves its last operations in the store and reads those of the rank before it in each group; and once more as
it leaves the world. Of operations of one number that both still know, the kind, the dtype and the number of elements
must agree. The rank's own thread takes no part in it until it leaves. Ranks that run thousands of operations a second
may know none of one number at that moment; then the next moment tells.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from unisono.comm import hang
from unisono.comm.log import UNEVEN, Entry, Log, quick_entry, written_entry


@dataclass(frozen=True)
class Kind:
    """An operation without its number."""

    op: str
    detail: str | None  # None: not kept
    dtype: str
    elements: int | None  # None: none, or they may differ between ranks
    shown: str  # with its detail
    what: str
    place: str

    def differs(self, other: Kind) -> bool:
        if self.op != other.op or self.dtype != other.dtype:
            return True
        if None not in (self.elements, other.elements) and self.elements != other.elements:
            return True
        return None not in (self.detail, other.detail) and self.detail != other.detail

    def entry(self, number: int) -> Entry:
        return Entry(number, self.shown, self.what, self.place)


Recent = dict[int, Kind]  # by number


@dataclass(frozen=True)
class Difference:
    dispute: hang.Dispute
    report: str  # from what ranks have left in the store


class Comparison:
    """Compares the logs of this rank with those of others, through the store."""

    def __init__(self, store: dist.Store, rank: int, size: int, logs: Sequence[Log]) -> None:
        """The list of logs may grow."""
        self._store = store
        self._rank = rank
        self._logs = logs
        self._period = 1.0 + size / 500  # seconds; thousands of ranks do not crowd round their store
        self._next = self._moment()
        self._left: dict[str, int] = {}  # how many operations of a group this rank has left in the store

    def _moment(self) -> float:
        """The next one that is common to all ranks whose clocks agree."""
        return (math.floor(time.time() / self._period) + 1) * self._period

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._next - time.time())

    def difference(self) -> Difference | None:
        """The first difference that shows; None where none does, or it is too early to look."""
        if self.seconds_left:
            return None
        self._next = self._moment()
        return self._compare(neighbours=(-1,))

    def last_difference(self) -> Difference | None:
        """As this rank leaves. Of two neighbours the one that leaves later finds what the other has left."""
        return self._compare(neighbours=(-1, 1))

    def _compare(self, neighbours: Sequence[int]) -> Difference | None:
        taken = [(log, recent(log)) for log in self._logs if log.count and not log.is_of_messages]
        for log, mine in taken:
            if self._left.get(log.group) != log.count:
                self._left[log.group] = log.count
                self._store.set(_key(log.group, self._rank), _packed(mine))
        for log, mine in taken:
            numbers = [self._first_difference(log, mine, step) for step in neighbours]
            number = min((number for number in numbers if number is not None), default=None)
            if number is not None:
                return Difference((log.group, number), self._report(log, mine, number))
        return None

    def _first_difference(self, log: Log, mine: Recent, step: int) -> int | None:
        other = log.ranks[(log.ranks.index(self._rank) + step) % len(log.ranks)]
        theirs = self._read(log.group, other) if other != self._rank else {}
        differing = [number for number in mine.keys() & theirs.keys() if mine[number].differs(theirs[number])]
        return min(differing, default=None)

    def _read(self, group: str, rank: int) -> Recent:
        key = _key(group, rank)
        return _unpacked(self._store.get(key)) if self._store.check([key]) else {}

    def _report(self, log: Log, mine: Recent, number: int) -> str:
        known: dict[int, Recent] = {self._rank: mine}
        deadline = time.monotonic() + 3 * self._period  # on a busy machine watches may miss a moment
        while len(known) < len(log.ranks) and time.monotonic() < deadline:  # others come to the same moment later
            for rank in set(log.ranks) - known.keys():
                theirs = self._read(log.group, rank)
                if number in theirs:
                    known[rank] = theirs
            time.sleep(0.02)
        camps: list[tuple[Kind, list[int]]] = []
        for rank in sorted(known):
            kind = known[rank][number]
            at = next((at for at, (first, _) in enumerate(camps) if not kind.differs(first)), None)
            if at is None:
                camps.append((kind, [rank]))
            else:
                first, ranks = camps[at]
                camps[at] = (first if first.place else kind, [*ranks, rank])
        where = "" if log.group == "world" else f" in the group of ranks {','.join(map(str, log.ranks))}"
        return hang.report_difference([(kind.entry(number), ranks) for kind, ranks in camps], where)


def recent(log: Log) -> Recent:
    """What the log still knows. Any thread may ask."""
    found = {}
    for number, (shape, dtype) in log.numbered_quicks().items():
        shown = quick_entry(number, shape, dtype)
        found[number] = Kind("all_reduce", None, str(dtype), math.prod(shape), shown.op, shown.what, "")
    for raw in list(log.ring):
        number, op, detail, tensor_shape, tensor_dtype = raw[:5]
        shown = written_entry(raw)
        even = tensor_shape is not None and UNEVEN not in detail
        elements = math.prod(tensor_shape) if even and tensor_shape is not None else None
        same = detail.replace(UNEVEN, "")
        family = op.removesuffix("_into")
        found[number] = Kind(family, same, str(tensor_dtype or ""), elements, shown.op, shown.what, shown.place)
    return found


def _key(group: str, rank: int) -> str:
    return f"recent/{group}/{rank}"


def _packed(recents: Mapping[int, Kind]) -> str:
    """As loops repeat themselves, each kind is written once."""
    kinds = list(dict.fromkeys(recents.values()))
    index = {kind: place for place, kind in enumerate(kinds)}
    numbers = [[number, index[kind]] for number, kind in recents.items()]
    return json.dumps({"kinds": [asdict(kind) for kind in kinds], "numbers": numbers})


def _unpacked(packed: bytes) -> Recent:
    told: dict[str, Any] = json.loads(packed)
    kinds = [Kind(**each) for each in told["kinds"]]
    return {number: kinds[place] for number, place in told["numbers"]}
