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

# number, operation, detail, shape, dtype, and where it was called: code and instruction
Raw = tuple[int, str, str, tuple[int, ...] | None, torch.dtype | None, CodeType, int]


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
    only counted, in `quick`: nothing else is treated so, and so a number that is missing in the ring was one of those.
    """

    __slots__ = ("append", "awaited", "entered", "group", "left", "quick", "quickest", "ranks", "ring")

    def __init__(self, group: str, ranks: tuple[int, ...]) -> None:
        self.group = group
        self.ranks = ranks
        self.ring: deque[Raw] = deque(maxlen=LENGTH)
        self.append = self.ring.append
        self.quick = 0
        self.quickest: tuple[tuple[int, ...], torch.dtype] | None = None  # the tensor of the last one of those
        self.entered = 0
        self.left = 0  # how many of those entered this rank has returned from
        self.awaited = 0  # the asynchronous operation that this rank waits for; 0 for none

    def enter(self, op: str, detail: str, tensor: torch.Tensor | None, depth: int) -> None:
        """Note that an operation begins; `depth` frames up stands the call in the user's code."""
        frame = sys._getframe(depth)
        shape, dtype = (None, None) if tensor is None else (tensor.shape, tensor.dtype)
        self.entered += 1
        self.append((self.count, op, detail, shape, dtype, frame.f_code, frame.f_lasti))

    @property
    def count(self) -> int:
        """How many operations were begun: the number of the last one."""
        return self.entered + self.quick

    @property
    def pending(self) -> int:
        """The number of the operation that this rank is blocked in; 0 for none."""
        return self.awaited or (self.count if self.entered > self.left else 0)

    def _what_of_quick(self, number: int) -> str:
        """The tensor of an operation that was only counted, if it was the last such."""
        written = {raw[0] for raw in self.ring}
        last = next((n for n in range(self.count, 0, -1) if n not in written), 0)
        return describe(*self.quickest) if self.quickest is not None and number == last else ""

    def raw(self, number: int) -> Raw | None:
        """What was written down of that operation, if it was and the log still has it."""
        return next((raw for raw in reversed(self.ring) if raw[0] == number), None)

    def entry(self, number: int) -> Entry | None:
        """The operation of that number, while the log still has it."""
        raw = self.raw(number)
        if raw is None:
            kept = max(0, self.count - LENGTH) < number <= self.count
            return Entry(number, "all_reduce", self._what_of_quick(number), "") if kept else None
        _, op, detail, shape, dtype, code, instruction = raw
        what = "" if shape is None or dtype is None else describe(shape, dtype)
        return Entry(number, f"{op}({detail})" if detail else op, what, place(code, line_of(code, instruction)))


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
