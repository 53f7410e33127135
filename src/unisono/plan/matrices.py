"""What attention takes on CPUs, by its matrices of queries by keys: one for each head of each sample.

A call takes some time beside them. A matrix takes time for its elements, each of which is a product over a head's width
and a softmax, which is as long as products over so much more width.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.plan.curve import Curve, seconds_at

HEAD_WIDTH = 32  # of the heads that curves are of


@dataclass(frozen=True)
class Matrices:
    """Seconds, forward and backward."""

    call: tuple[float, ...]
    forward: Curve  # seconds of a matrix by its elements
    backward: Curve
    softmax_width: tuple[float, ...] = (0.0, 0.0)

    def seconds(self, matrices: float, elements: float, width: float) -> tuple[float, float]:
        """Of a call with so many matrices of so many elements."""
        forward, backward = (
            call + matrices * _each(curve, elements) * (width + softmax) / (HEAD_WIDTH + softmax)
            for call, curve, softmax in zip(self.call, (self.forward, self.backward), self.softmax_width, strict=True)
        )
        return forward, backward


def _each(curve: Curve, elements: float) -> float:
    """Seconds of a matrix; of those smaller than any that was measured, on the way to nothing."""
    smallest, seconds = curve[0]
    return seconds_at(curve, elements) if elements >= smallest else seconds * elements / smallest
