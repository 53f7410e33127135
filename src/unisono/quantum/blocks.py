"""Amplitudes of a rank by the bits of their index: those where some bits are given, those where some are flipped."""

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


def flipped(amplitudes: torch.Tensor, mask: int) -> torch.Tensor:
    """amplitudes[i ^ mask], for all i: bits that are flipped become dimensions to reverse."""
    shape, dims, run = [], [], 1
    for bit in reversed(range(len(amplitudes).bit_length() - 1)):
        if mask >> bit & 1:
            shape += [run, 2]
            dims.append(len(shape) - 1)
            run = 1
        else:
            run *= 2
    return amplitudes.view(*shape, run).flip(dims).reshape(-1) if mask else amplitudes
