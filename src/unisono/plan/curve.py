"""Curves: what has been measured of calls of several sizes, and what that says of others."""

from __future__ import annotations

import math
from bisect import bisect_right

Curve = tuple[tuple[float, float], ...]  # (size, share or seconds), sizes rising


def share_at(curve: Curve, size: float) -> float:
    """The curve's value at a size: straight between points over the logarithm, flat beyond them."""
    place = bisect_right(curve, (size, math.inf))
    if place == 0:
        # Below the first point a call takes as long as the smallest that was measured.
        return curve[0][1] * max(size, 1.0) / curve[0][0] if len(curve) > 1 else curve[0][1]
    if place == len(curve):
        return curve[-1][1]
    (low, below), (high, above) = curve[place - 1], curve[place]
    part = math.log(size / low) / math.log(high / low)
    return below + (above - below) * part


def seconds_at(curve: Curve, size: float) -> float:
    """The time that a measured curve (bytes, seconds) gives: flat below its sizes, beyond them at its last slope."""
    place = bisect_right(curve, (size, math.inf))
    if place == 0 or len(curve) == 1:
        return curve[0][1]
    (low, below), (high, above) = curve[min(place, len(curve) - 1) - 1], curve[min(place, len(curve) - 1)]
    return max(below + (above - below) * (size - low) / (high - low), curve[0][1])
