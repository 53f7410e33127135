"""The operation log of one group on one rank: its last operations, which the watchdog reads when a job hangs.

It is written on every operation, so it does as little as it can: the caller's code object and instruction are kept, and
only a report works out the source line.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from functools import cache, lru_cache
from types import CodeType, FrameType
from typing import NamedTuple

import torch

LENGTH = 64
P2P = "/p2p"  # suffix of a group's name: the log of its point-to-point operations
UNEVEN = "uneven"  # in the detail of an operation: shapes may differ between ranks
_COMM = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

# number, operation, detail, shape, dtype, where it was called (code, instruction)
Record = tuple[int, str, str, tuple[int, ...] | None, torch.dtype | None, CodeType, int]


class LoggedOp(NamedTuple):
    """One operation as a report shows it."""

    number: int  # from 1
    op: str
    what: str  # dtype and shape, or nothing
    location: str  # file:line of the call

    @classmethod
    def of(cls, record: Record) -> LoggedOp:
        number, op, detail, shape, dtype, code, instruction = record
        what = "" if shape is None or dtype is None else describe(shape, dtype)
        return cls(number, f"{op}({detail})" if detail else op, what, location(code, line_of(code, instruction)))

    def __str__(self) -> str:
        return f"{self.op} #{self.number}{self.what and ' '}{self.what} at {self.location}"


class OpLog:
    """The last `LENGTH` operations of one group on this rank, numbered from 1. Any thread may read it."""

    __slots__ = ("append", "awaited", "entered", "group", "left", "ranks", "ring")

    def __init__(self, group: str, ranks: tuple[int, ...]) -> None:
        self.group = group
        self.ranks = ranks
        self.ring: deque[Record] = deque(maxlen=LENGTH)
        self.append = self.ring.append
        self.entered = 0  # the number of the last operation begun
        self.left = 0  # how many of those entered this rank has returned from
        self.awaited = 0  # the asynchronous operation that this rank waits for; 0 for none

    def enter(self, op: str, detail: str, tensor: torch.Tensor | None, frame: FrameType | None = None) -> None:
        """Record that an operation begins, called from `frame` (default: the first one outside unisono.comm)."""
        frame = frame or caller()
        shape, dtype = (None, None) if tensor is None else (tensor.shape, tensor.dtype)
        self.entered += 1
        self.append((self.entered, op, detail, shape, dtype, frame.f_code, frame.f_lasti))

    @property
    def is_p2p(self) -> bool:
        """Whether it logs point-to-point operations, which each rank numbers for itself."""
        return self.group.endswith(P2P)

    @property
    def pending(self) -> int:
        """The number of the operation that this rank is blocked in; 0 for none."""
        return self.awaited or (self.entered if self.entered > self.left else 0)

    def record(self, number: int) -> Record | None:
        return next((record for record in reversed(list(self.ring)) if record[0] == number), None)

    def entry(self, number: int) -> LoggedOp | None:
        """The operation of that number, while the log still has it."""
        record = self.record(number)
        return None if record is None else LoggedOp.of(record)


def caller() -> FrameType:
    """The innermost frame of this thread that is not in unisono.comm; called from code there."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_COMM):
        frame = frame.f_back
    return frame


def root_detail(root: int) -> str:
    return f"root={root}" if root else ""


def op_detail(op: str) -> str:
    return "" if op == "sum" else op


def describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """A tensor in short: float32[16, 1024]."""
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


@lru_cache(maxsize=4096)
def line_of(code: CodeType, instruction: int) -> int:
    """The source line of an instruction of `code`."""
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno


def location(code: CodeType, line: int) -> str:
    """file:line, the path relative to the working directory where the file is below it."""
    return f"{shown(code.co_filename)}:{line}"


@cache
def shown(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def frame_location(frame: FrameType) -> str:
    return location(frame.f_code, frame.f_lineno)
