"""Pauli words and amplitudes: the sums that expectation values are made of, and words applied to a state.

A word sends amplitude i to i ^ flip with the sign (-1)^popcount(i & sign). Words that flip the same bits are done
together. `theirs` are the amplitudes that a word acts on, `mine` or `into` those where they go; all are arrays of the
same power of two.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.quantum.blocks import flipped
from unisono.quantum.kernels.threads import count, together

_BLOCK = 256  # amplitudes that a block of the fast kernel holds
_SMALL = 8  # bits of a sum that is done as one product with a matrix of signs


def word_sums(mine: torch.Tensor, theirs: torch.Tensor, flip: int, signs: NDArray[np.int64]) -> NDArray[np.complex128]:
    """For each sign mask, the sum over i of conj(theirs[i ^ flip]) * mine[i] * (-1)^popcount(i & sign)."""
    if not _fast(mine):
        return signed_sums(flipped(theirs, flip).conj() * mine, signs).cpu().numpy()
    from unisono.quantum.kernels import words_cpu

    blocks, block = _blocks(mine)
    threads = min(count(), blocks)
    sums = np.zeros((threads, len(signs), 2))
    ours, other, low = _parts(mine), _parts(theirs), _low_signs(signs, block, _parts(mine).dtype)

    def call(number: int) -> None:
        begin, end = blocks * number // threads, blocks * (number + 1) // threads
        words_cpu.sums(ours, other, flip, signs, low, begin, end, sums[number])

    together(call, threads)
    total: NDArray[np.float64] = sums.sum(axis=0)
    return total[:, 0] + 1j * total[:, 1]


def add_words(
    into: torch.Tensor, theirs: torch.Tensor, flip: int, signs: NDArray[np.int64], factors: NDArray[np.complex128]
) -> None:
    """into[i ^ flip] += theirs[i] * sum over words of factor * (-1)^popcount(i & sign)."""
    if not _fast(into):
        scale = torch.zeros_like(theirs)
        for sign, factor in zip(signs.tolist(), factors.tolist(), strict=True):
            scale.add_(_signs(len(theirs), sign, theirs), alpha=factor)
        into += flipped(theirs * scale, flip)
        return
    from unisono.quantum.kernels import words_cpu

    blocks, block = _blocks(into)
    threads = min(count(), blocks)
    out, other = _parts(into), _parts(theirs)
    low = _low_signs(signs, block, out.dtype)
    parts = np.stack([factors.real, factors.imag], axis=1).astype(out.dtype)

    def call(number: int) -> None:
        begin, end = blocks * number // threads, blocks * (number + 1) // threads
        words_cpu.add(out, other, flip, signs, parts, low, begin, end)

    together(call, threads)


def signed_sums(values: torch.Tensor, masks: NDArray[np.int64]) -> torch.Tensor:
    """For each mask, the sum of values[i] * (-1)^popcount(i & mask), in complex128; masks share what they can."""
    out = torch.zeros(len(masks), dtype=torch.complex128, device=values.device)
    _sum_into(out, values, len(values).bit_length() - 1, masks, np.arange(len(masks)))
    return out


def _sum_into(
    out: torch.Tensor, values: torch.Tensor, bits: int, masks: NDArray[np.int64], which: NDArray[np.int64]
) -> None:
    if bits <= _SMALL:
        signs = torch.from_numpy(_low_signs(masks[which], 1 << bits, np.dtype(np.float64))).to(out)
        out[torch.from_numpy(which)] = signs @ values.to(out.dtype)
        return
    half = values.view(2, -1)
    odd = (masks[which] >> (bits - 1) & 1).astype(bool)
    for chosen, signed in ((which[~odd], torch.add), (which[odd], torch.sub)):
        if len(chosen):
            _sum_into(out, signed(half[0], half[1]), bits - 1, masks, chosen)


def _signs(size: int, mask: int, like: torch.Tensor) -> torch.Tensor:
    """(-1)^popcount(i & mask) for all i, by doubling."""
    signs = torch.ones(1, dtype=like.dtype, device=like.device)
    for bit in range(size.bit_length() - 1):
        signs = torch.cat([signs, -signs if mask >> bit & 1 else signs])
    return signs


def _low_signs(masks: NDArray[np.int64], size: int, dtype: np.dtype) -> NDArray:
    """The signs of the first `size` places, a row a mask."""
    both = masks[:, None] & np.arange(size)
    parity = np.zeros_like(both)
    for bit in range(size.bit_length() - 1):
        parity ^= both >> bit & 1
    return (1 - 2 * parity).astype(dtype)


def _fast(amplitudes: torch.Tensor) -> bool:
    return amplitudes.device.type == "cpu" and importlib.util.find_spec("numba") is not None


def _blocks(amplitudes: torch.Tensor) -> tuple[int, int]:
    block = min(_BLOCK, len(amplitudes))
    return len(amplitudes) // block, block


def _parts(amplitudes: torch.Tensor) -> NDArray:
    return torch.view_as_real(amplitudes).view(-1).numpy()
