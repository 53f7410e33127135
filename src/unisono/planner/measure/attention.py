"""Times attention on CPUs by its matrices of queries by keys: the figures of `AttentionTime`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from unisono.mesh.random.draw import draw_fast
from unisono.mesh.random.state import RandomState
from unisono.plan.hardware.spec import HEAD_WIDTH
from unisono.planner.measure.links import Points
from unisono.planner.measure.ops import Clock

_LENGTHS = (16, 32, 128, 512, 1024)
_SHORT = 32  # up to here a matrix is told from what is beside it by calls with more of them
_LONG = 512  # beyond, no kernel is another with dropout, which takes long
_HEADS = 4
_FEW, _MORE = 2, 8  # samples
_NARROW, _WIDE = 16, 64  # heads


class AttentionTimer:
    """Times attentions of one dtype."""

    def __init__(self, clock: Clock, dtype: torch.dtype) -> None:
        self._clock = clock
        self._dtype = dtype

    def figures(self, dropout: float) -> dict[str, list[Any]]:
        """Seconds forward and backward: of a call, and points (elements of a matrix, seconds of one); and how wide a
        head would be whose products take as long as the softmax."""
        if dropout:
            draw_fast()
        with RandomState(0):
            lengths = [length for length in _LENGTHS[: self._clock.care.lengths] if length <= _LONG or not dropout]
            call, points = self._points(lengths, dropout)
            width = self._softmax_width(min(lengths[-1], _LONG), dropout, call)
        return {"call": call, "softmax_width": width, "forward": points[0], "backward": points[1]}

    def _points(self, lengths: list[int], dropout: float) -> tuple[list[float], tuple[Points, Points]]:
        call: list[float] = []
        points: tuple[Points, Points] = ([], [])
        for length in lengths:
            few = self._passes(length, HEAD_WIDTH, dropout)
            if length <= _SHORT:
                each = self._each(few, self._passes(length, HEAD_WIDTH, dropout, _MORE))
                call = call or [max(taken - _FEW * _HEADS * one, 0.0) for taken, one in zip(few, each, strict=True)]
            else:
                own = (max(taken - beside, taken / 2) for taken, beside in zip(few, call, strict=True))
                each = [taken / (_FEW * _HEADS) for taken in own]
            for of_pass, one in zip(points, each, strict=True):
                of_pass.append((float(length**2), one))
        return call, points

    def _each(self, few: tuple[float, float], more: tuple[float, float]) -> list[float]:
        """Seconds of a matrix, by how much longer it takes with more of them."""
        apart = (_MORE - _FEW) * _HEADS
        return [max(most - least, least / 100) / apart for least, most in zip(few, more, strict=True)]

    def _softmax_width(self, length: int, dropout: float, call: list[float]) -> list[float]:
        """From heads of two widths: what they take is a straight line over the width, which meets zero there."""
        narrow, wide = (self._passes(length, width, dropout) for width in (_NARROW, _WIDE))
        found = []
        for less, more, beside in zip(narrow, wide, call, strict=True):
            slope = max(more - less, less / 100) / (_WIDE - _NARROW)
            found.append(max((less - beside) / slope - _NARROW, 0.0))
        return found

    def _passes(self, length: int, width: int, dropout: float, rows: int = _FEW) -> tuple[float, float]:
        q, k, v = self._clock.queries_keys_values(rows, length, _HEADS, width, self._dtype, grad=True)
        return self._clock.passes(partial(F.scaled_dot_product_attention, q, k, v, dropout_p=dropout, is_causal=True))
