"""The log of one group on one rank: its last operations, for the watch to read when a job hangs.

Written on every operation, so it does as little as it can: a frame's code and instruction are kept instead of its
line, which only a report needs.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from dataclasses import dataclass
from types import CodeType, FrameType

import torch

LENGTH = 64
MESSAGES = "/p2p"  # at the end of a group's name: its messages between two ranks
UNEVEN = "uneven"  # in the detail of an operation: shapes may differ between ranks

# number, operation, detail, shape, dtype, where it was called (code, instruction), how many quick ones came before
Raw = tuple[int, str, str, tuple[int, ...] | None, torch.dtype | None, CodeType, int, int]
Run = tuple[int, tuple[int, ...], torch.dtype]  # the first of some quick ones that are alike, from 1; shape, dtype


@dataclass(frozen=True)
class Entry:
    """One operation as a report shows it."""

    number: int  # from 1
    op: str
    what: str  # dtype and shape, or nothing
    place: str  # file:line of the call, or nothing

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        return f"{self.op} #{self.number}{self.what and ' '}{self.what}{where}"


class Log:
    """The last `LENGTH` operations of one group on this rank, numbered from 1.

    An operation that may block is written down in the ring before it does. A small all_reduce that was over at once is
    only counted; `runs` tell which of those had tensors of how many numbers, and the shape of the first of each run.
    Nothing else is treated so, and so a number that is missing in the ring was one of those.
    """

    __slots__ = (
        *("append", "awaited", "entered", "group", "left", "quick"),
        *("ranks", "ring", "run_elements", "run_kind", "runs"),
    )

    def __init__(self, group: str, ranks: tuple[int, ...]) -> None:
        self.group = group
        self.ranks = ranks
        self.ring: deque[Raw] = deque(maxlen=LENGTH)
        self.append = self.ring.append
        self.quick = 0
        self.runs: deque[Run] = deque(maxlen=LENGTH)
        self.run_elements = -1  # of each tensor of the last run
        self.run_kind: object = None  # what else its calls have in common
        self.entered = 0
        self.left = 0  # how many of those entered this rank has returned from
        self.awaited = 0  # the asynchronous operation that this rank waits for; 0 for none

    def enter(self, op: str, detail: str, tensor: torch.Tensor | None, depth: int) -> None:
        """Note that an operation begins; `depth` frames up stands the call in the user's code."""
        frame = sys._getframe(depth)
        shape, dtype = (None, None) if tensor is None else (tensor.shape, tensor.dtype)
        self.entered += 1
        self.append((self.count, op, detail, shape, dtype, frame.f_code, frame.f_lasti, self.quick))

    def begin_run(self, tensor: torch.Tensor, elements: int, kind: object) -> None:
        """Count a quick one that is not like the last."""
        self.runs.append((self.quick + 1, tensor.shape, tensor.dtype))
        self.run_elements, self.run_kind = elements, kind
        self.quick += 1  # last: who reads this first finds the run of every one that it counts

    def withdraw(self) -> None:
        """The operation just entered was refused before another rank was asked: it does not count."""
        self.entered -= 1
        self.ring.pop()

    @property
    def is_of_messages(self) -> bool:
        """Whether it is of messages between two ranks: each counts those for itself."""
        return self.group.endswith(MESSAGES)

    @property
    def count(self) -> int:
        """How many operations were begun: the number of the last one."""
        return self.entered + self.quick

    @property
    def pending(self) -> int:
        """The number of the operation that this rank is blocked in; 0 for none."""
        return self.awaited or (self.count if self.entered > self.left else 0)

    def raw(self, number: int) -> Raw | None:
        """What was written down of that operation, if it was and the log still has it."""
        return next((raw for raw in reversed(self.ring) if raw[0] == number), None)

    def entry(self, number: int) -> Entry | None:
        """The operation of that number, while the log still has it."""
        raw = self.raw(number)
        if raw is not None:
            return written_entry(raw)
        if max(0, self.count - LENGTH) < number <= self.count:
            shape_of = self.numbered_quicks()
            return quick_entry(number, *shape_of[number]) if number in shape_of else Entry(number, "all_reduce", "", "")
        return None

    def numbered_quicks(self) -> dict[int, tuple[tuple[int, ...], torch.dtype]]:
        """The tensors of the last quick ones by the numbers of the operations. Any thread may ask."""
        last = self.quick  # before the rest: what is written there meanwhile came later than all of these
        runs = list(self.runs)
        places = [(raw[7], raw[0] - raw[7]) for raw in list(self.ring)]  # quick ones before it; which of the written
        first = max(1, last - LENGTH + 1)
        if places and places[0][1] > 1:  # some are forgotten: only what came after the first that is left is sure
            first = max(first, places[0][0] + 1)
        found = {}
        for which in range(first, last + 1):
            run = next((run for run in reversed(runs) if run[0] <= which), None)
            if run is not None:
                written = max((nth for before, nth in places if before < which), default=0)
                found[which + written] = run[1:]
        return found


def written_entry(raw: Raw) -> Entry:
    number, op, detail, shape, dtype, code, instruction, _ = raw
    what = "" if shape is None or dtype is None else describe(shape, dtype)
    return Entry(number, f"{op}({detail})" if detail else op, what, place(code, line_of(code, instruction)))


def quick_entry(number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Entry:
    return Entry(number, "all_reduce", describe(shape, dtype), "")


def described_call(op: str, detail: str, number: int, tensor: torch.Tensor | None) -> str:
    """A call as reports show it, without its place."""
    what = "" if tensor is None else f" {describe(tensor.shape, tensor.dtype)}"
    return f"{op}({detail}) #{number}{what}" if detail else f"{op} #{number}{what}"


def detail_of_root(root: int) -> str:
    return f"root={root}" if root else ""


def detail_of_op(op: str) -> str:
    return "" if op == "sum" else op


def describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """A tensor in short: float32[16, 1024]."""
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def line_of(code: CodeType, instruction: int) -> int:
    """The source line of an instruction of `code`."""
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno


def place(code: CodeType, line: int) -> str:
    """file:line, the file as short as it is clear from the working folder."""
    path = code.co_filename
    relative = os.path.relpath(path)
    return f"{path if relative.startswith('..') else relative}:{line}"


def frame_place(frame: FrameType) -> str:
    return place(frame.f_code, frame.f_lineno)
