"""Collectives on Python values: they are sent as bytes, over torch.distributed on any backend.

Plain data is sent as data (signatures/plain_data.py), which runs no code when it is read; every other value is pickled.
With only_data=True nothing is pickled, and a pickle that arrives is refused: unisono's own messages about training are
sent so. Unpickling runs code that the sender chooses: what arrives is read only when its signature is the job's
(signatures/seal.py).

The lengths are sent first, which blocks even with async_op=True; then the bytes. So ranks that wait at once and ranks
that wait later run the same collectives in the same order. A value that cannot be sent is an error on every rank: the
reason is sent instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.c10d import all_gather_single
from unisono.comm.operation import Outcome, Transfer
from unisono.comm.p2p import PointToPoint
from unisono.comm.signatures.object_bytes import object_of_bytes, object_to_bytes
from unisono.comm.signatures.plain_data import NotPlainError
from unisono.comm.signatures.seal import ALL, Seal
from unisono.comm.watchdog.op_log import root_detail
from unisono.errors import UsageError

_REFUSAL = b"R"  # how what is sent instead of an object begins


class Objects(PointToPoint):
    """Collectives on values of any kind that can be pickled.

    only_data: send plain data only (None, numbers, str, bytes, dtypes, devices, tensors on the CPU, and tuples, lists,
    dicts and sets of these) and accept nothing else, so that no rank runs code that another process has sent.
    """

    def broadcast_object(
        self, value: Any, root: int = 0, *, only_data: bool = False, async_op: bool = False
    ) -> Outcome:
        """The root's value, on every rank."""
        self._require_rank("root", root)
        if self.is_simulated:
            return self._alike("broadcast_object", value, async_op)
        is_root = self.rank == root
        sealed = Sealed(self.seal, "broadcast_object", self.rank, only_data)
        sent = Encoded(value, sealed) if is_root else None
        received: list[torch.Tensor] = []

        def start() -> list[dist.Work]:
            length = torch.tensor([0 if sent is None else len(sent.bytes)])
            dist.broadcast(length, group=self.group, group_src=root)
            received.append(torch.empty(int(length), dtype=torch.uint8) if sent is None else sent.bytes)
            return [dist.broadcast(received[0], group=self.group, group_src=root, async_op=True)]

        def finish() -> Any:
            return sealed.value(received[0], root) if sent is None or sent.is_refused else value

        return self._run_objects("broadcast_object", root, start, finish, async_op)

    def all_gather_object(self, value: Any, *, only_data: bool = False, async_op: bool = False) -> Outcome:
        """Every rank's value, on every rank."""
        if self.is_simulated:
            return self._alike("all_gather_object", [value] * self.size, async_op)
        sealed = Sealed(self.seal, "all_gather_object", self.rank, only_data)
        sent, rows = Encoded(value, sealed), EncodedRows(sealed)

        def start() -> list[dist.Work]:
            rows.take(self._all_lengths(sent))
            mine, rows.bytes = rows.row(sent.bytes), rows.table()
            return [all_gather_single(rows.bytes, mine, group=self.group, async_op=True)]

        return self._run_objects("all_gather_object", 0, start, rows.values, async_op)

    def gather_object(self, value: Any, root: int = 0, *, only_data: bool = False, async_op: bool = False) -> Outcome:
        """On the root every rank's value; None elsewhere."""
        self._require_rank("root", root)
        if self.is_simulated:
            return self._alike("gather_object", [value] * self.size if self.rank == root else None, async_op)
        is_root = self.rank == root
        sealed = Sealed(self.seal, "gather_object", self.rank, only_data)
        sent, rows = Encoded(value, sealed), EncodedRows(sealed)

        def start() -> list[dist.Work]:
            rows.take(self._all_lengths(sent))
            mine, rows.bytes = rows.row(sent.bytes), rows.table()
            out = list(rows.bytes.view(self.size, -1)) if is_root else None
            return [dist.gather(mine, out, group=self.group, group_dst=root, async_op=True)]

        def finish() -> list[Any] | None:
            if is_root:
                return rows.values()
            if sent.is_refused:
                sealed.value(sent.bytes, self.rank)
            if rows.refused:
                why = "is no plain data" if only_data else "cannot be pickled"
                raise UsageError(f"gather_object: what rank {rows.refused[0]} gave {why}; its own error has the reason")
            return None

        return self._run_objects("gather_object", root, start, finish, async_op)

    def scatter_object(
        self, values: Sequence[Any] | None = None, root: int = 0, *, only_data: bool = False, async_op: bool = False
    ) -> Outcome:
        """values[rank] of the root; only the root passes `values`."""
        self._require_rank("root", root)
        is_root = self.rank == root
        if is_root and (not isinstance(values, Sequence) or len(values) != self.size):
            given = len(values) if isinstance(values, Sequence) else repr(values)
            raise UsageError(f"scatter_object: the root needs {self.size} values, one a rank, but got {given}")
        sealed = Sealed(self.seal, "scatter_object", self.rank, only_data)
        each_sent = [Encoded(value, sealed, to) for to, value in enumerate(values or ())] if is_root else []
        if refusal := next((each for each in each_sent if each.is_refused), None):
            each_sent = [refusal.sent_to(to) for to in range(self.size)]
        sent = [each.bytes for each in each_sent]
        rows = EncodedRows(sealed)

        def start() -> list[dist.Work]:
            lengths = torch.tensor([len(each) for each in sent] or [0] * self.size)
            dist.broadcast(lengths, group=self.group, group_src=root)
            rows.take(lengths.tolist())
            rows.bytes = rows.row(torch.empty(0, dtype=torch.uint8))
            chunks = [rows.row(each) for each in sent] or None
            return [dist.scatter(rows.bytes, chunks, group=self.group, group_src=root, async_op=True)]

        return self._run_objects(
            "scatter_object",
            root,
            start,
            lambda: sealed.value(rows.bytes[: rows.lengths[self.rank]], root, self.rank),
            async_op,
        )

    def _alike(self, op: str, outcome: Any, async_op: bool) -> Outcome:
        """Of simulated ranks, which all have this rank's value."""
        return self._run_objects(op, 0, list, lambda: outcome, async_op)

    def _run_objects(
        self, op: str, root: int, start: Callable[[], list[dist.Work]], finish: Callable[[], Any], async_op: bool
    ) -> Outcome:
        def run() -> None:
            for work in start():
                work.wait()

        return self._run(op, None, Transfer(start, finish, run), None, async_op, root_detail(root))

    def _all_lengths(self, mine: Encoded) -> list[int]:
        """Of every rank's bytes; negative where it holds a refusal."""
        lengths = torch.empty(self.size, dtype=torch.int64)
        length = -len(mine.bytes) if mine.is_refused else len(mine.bytes)
        all_gather_single(lengths, torch.tensor([length]), group=self.group)
        return lengths.tolist()


class EncodedRows:
    """Values of all ranks as bytes, one row each, as long as the longest."""

    lengths: list[int]
    refused: list[int]  # ranks whose value cannot be sent
    bytes: torch.Tensor

    def __init__(self, sealed: Sealed) -> None:
        self._sealed = sealed

    def take(self, lengths: Sequence[int]) -> None:
        self.lengths = [abs(length) for length in lengths]
        self.refused = [rank for rank, length in enumerate(lengths) if length < 0]

    def row(self, value: torch.Tensor) -> torch.Tensor:
        row = torch.zeros(max(self.lengths), dtype=torch.uint8)
        row[: len(value)] = value
        return row

    def table(self) -> torch.Tensor:
        return torch.empty(len(self.lengths) * max(self.lengths), dtype=torch.uint8)

    def values(self) -> list[Any]:
        rows = self.bytes.view(len(self.lengths), -1)
        both = enumerate(zip(rows, self.lengths, strict=True))
        return [self._sealed.value(row[:length], rank) for rank, (row, length) in both]


class Encoded:
    """A value as bytes, or why it cannot be sent."""

    def __init__(self, value: Any, sealed: Sealed, to: int = ALL) -> None:
        self.is_refused = False
        self._sealed = sealed
        try:
            self._data = object_to_bytes(value, sealed.only_data)
        except Exception as error:
            self.is_refused = True
            self._data = _REFUSAL + _reason(value, sealed.op, sealed.rank, error).encode("utf-8", "backslashreplace")
        self.bytes = sealed.sign(self._data, to)

    def sent_to(self, to: int) -> Encoded:
        """The same for another rank."""
        other = copy.copy(self)
        other.bytes = self._sealed.sign(self._data, to)
        return other


def _reason(value: Any, op: str, rank: int, error: Exception) -> str:
    kind = type(value)
    given = f"{op}: rank {rank} gave a value of type {kind.__module__}.{kind.__qualname__} that"
    if isinstance(error, NotPlainError):
        return f"{given} is no plain data ({error}), with only_data=True; pass plain data, or no only_data on any rank"
    return (
        f"{given} cannot be pickled ({type(error).__name__}: {error}); pass plain data, tensors, or functions and "
        "classes of a module's top level"
    )


class Sealed:
    """One operation on objects, for the signatures of what is sent in it."""

    def __init__(self, seal: Seal, op: str, rank: int, only_data: bool) -> None:
        self.op = op
        self.rank = rank
        self.only_data = only_data
        self._seal = seal
        self._number = seal.next_number()

    def sign(self, content: bytes, to: int = ALL) -> torch.Tensor:
        return self._seal.sign(content, self.op, self._number, self.rank, to)

    def value(self, received: torch.Tensor, source: int, to: int = ALL) -> Any:
        content = self._seal.verified(received, self.op, self._number, source, to)
        if content[:1] == _REFUSAL:
            raise UsageError(content[1:].decode("utf-8", "replace"))
        return object_of_bytes(content, f"{self.op}: what came as rank {source}'s object", self.only_data)
