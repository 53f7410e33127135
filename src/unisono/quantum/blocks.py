"""Views of the amplitudes of a rank: those where some axes have given bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def block(local: torch.Tensor, axes: Sequence[int], value: int) -> torch.Tensor:
    """The part of a local array where `axes` read `value` (first axis most significant): a view of few dimensions."""
    bits = {axis: value >> (len(axes) - 1 - number) & 1 for number, axis in enumerate(axes)}
    shape: list[int] = []
    index: list[int | slice] = []
    past = 0
    for axis in sorted(bits):
        shape += [2 ** (axis - past), 2]
        index += [slice(None), bits[axis]]
        past = axis + 1
    return local.view(*shape, -1)[tuple(index)]
