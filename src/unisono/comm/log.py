"""The log of one group on one rank: its last operations, for the watch to read when a job hangs.

Written on every operation, so it does as little as it can: a frame's code and instruction are kept instead of its
line, which only a report needs.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

LENGTH = 64  # a power of two


@dataclass(frozen=True)
class Entry:
    """One operation as a report shows it."""

    number: int  # from 1
    op: str
    what: str  # dtype and shape, or nothing
    place: str  # file:line of the call

    def __str__(self) -> str:
        return f"{self.op} #{self.number}{self.what and ' '}{self.what} at {self.place}"


class Log:
    """The last `LENGTH` operations of one group on this rank, numbered from 1."""

    __slots__ = ("_ring", "awaited", "entered", "group", "left", "ranks")

    def __init__(self, group: str, ranks: tuple[int, ...]) -> None:
        self.group = group
        self.ranks = ranks
        self.entered = 0  # operations begun
        self.left = 0  # the last operation that this rank returned from
        self.awaited = 0  # the asynchronous operation that this rank waits for; 0 for none
        self._ring: list[tuple[Any, ...]] = [()] * LENGTH

    def enter(self, op: str, detail: str, tensor: torch.Tensor | None, depth: int) -> None:
        """Note that an operation begins; `depth` frames up stands the call in the user's code."""
        frame = sys._getframe(depth)
        number = self.entered + 1
        if tensor is None:
            self._ring[number & 63] = (op, detail, None, None, frame.f_code, frame.f_lasti)
        else:
            self._ring[number & 63] = (op, detail, tensor.shape, tensor.dtype, frame.f_code, frame.f_lasti)
        self.entered = number

    def leave(self) -> None:
        self.left = self.entered

    @property
    def pending(self) -> int:
        """The number of the operation that this rank is blocked in; 0 for none."""
        return self.awaited or (self.entered if self.entered > self.left else 0)

    def raw(self, number: int) -> tuple[Any, ...] | None:
        return self._ring[number & 63] if max(0, self.entered - LENGTH) < number <= self.entered else None

    def entry(self, number: int) -> Entry | None:
        """The operation of that number, while the log still has it."""
        raw = self.raw(number)
        if not raw:
            return None
        op, detail, shape, dtype, code, instruction = raw
        what = "" if shape is None else describe(shape, dtype)
        return Entry(number, f"{op}({detail})" if detail else op, what, place(code, line_of(code, instruction)))


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
