"""Traffic: the communication of this rank, counted. For tests, reports and estimates; costs nothing when unused.

    with traffic.counted() as seen:
        step()
    seen.calls["all_reduce"], seen.payload["all_reduce"], seen.sent

Counts the operations of unisono's communicators, not those of torch's own functions. A callback passed to `counted`
gets a record of each of them, and of each point-to-point receive.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

# What a rank sends, as a multiple of the tensor that it passes, when n ranks use the best known algorithm.
_SHARES = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_gather": lambda n: n - 1,
}


@dataclass(frozen=True)
class CommRecord:
    """One operation, as this rank began it."""

    op: str
    ranks: tuple[int, ...]  # of the world: all that take part, or the one that a message is to or from
    tensor: torch.Tensor | None


@dataclass
class Traffic:
    """Operations by name: how often, with how many bytes in this rank's own tensors, and what it sent for them."""

    calls: Counter[str] = field(default_factory=Counter)
    payload: Counter[str] = field(default_factory=Counter)
    sent_by: dict[str, float] = field(default_factory=dict)
    on_record: Callable[[CommRecord], None] = lambda record: None

    @property
    def sent(self) -> float:
        """Bytes that this rank sent in all."""
        return sum(self.sent_by.values())

    def note(self, op: str, size: int, payload: int) -> None:
        op = "all_gather" if op == "all_gather_into" else op
        self.calls[op] += 1
        self.payload[op] += payload
        share = _SHARES[op](size) if op in _SHARES else float(size > 1)
        self.sent_by[op] = self.sent_by.get(op, 0.0) + payload * share


def received_bytes(op: str, size: int, payload: int) -> int:
    """What a rank receives in an operation of `size` ranks to which it passes `payload` bytes."""
    if op == "send" or (size < 2 and op != "recv"):
        return 0
    return round(payload * (_SHARES[op](size) if op in _SHARES else 1.0))


counters: list[Traffic] = []


def note(op: str, size: int, tensor: torch.Tensor | None, ranks: tuple[int, ...]) -> None:
    """Called by communicators while there are counters."""
    payload = 0 if tensor is None else tensor.numel() * tensor.element_size()
    for counter in counters:
        counter.note(op, size, payload)
        counter.on_record(CommRecord(op, ranks, tensor))


def note_arrival(tensor: torch.Tensor, source: int) -> None:
    """Of a message from one rank, whose bytes count where they were sent."""
    for counter in counters:
        counter.on_record(CommRecord("recv", (source,), tensor))


@contextlib.contextmanager
def counted(on_record: Callable[[CommRecord], None] = lambda record: None) -> Iterator[Traffic]:
    """Count the communication in the block."""
    counter = Traffic(on_record=on_record)
    counters.append(counter)
    try:
        yield counter
    finally:
        counters[:] = [other for other in counters if other is not counter]
