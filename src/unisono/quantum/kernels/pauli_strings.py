"""Pauli strings and amplitudes: the sums that expectation values are made of, and strings applied to a state.

A string maps amplitude i to i ^ flip with the sign (-1)^popcount(i & sign). Strings that flip the same bits form a
group. `theirs` are the amplitudes that a string acts on, `mine` or `into` those where they go; all are arrays of the
same power of two.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.quantum.kernels.reference import flipped
from unisono.quantum.kernels.workspace import count, together, workspace

_SUM_BLOCK, _ADD_BLOCK = 256, 1024  # amplitudes that a block of the fast kernels holds
_SMALL = 8  # bits of a sum that is done as one product with a matrix of signs

Group = tuple[int, NDArray[np.int64]]  # what the Pauli strings flip, and the mask of each Pauli string's sign
Weighted = tuple[int, NDArray[np.int64], NDArray[np.complex128]]  # and each Pauli string's factor


def pauli_sums(mine: torch.Tensor, theirs: torch.Tensor, groups: Sequence[Group]) -> list[NDArray[np.complex128]]:
    """For each group, and each sign mask of it: the sum over i of conj(theirs[i ^ flip]) * mine[i] * (-1)^popcount(i &
    sign)."""
    if not _fast(mine):
        return [signed_sums(flipped(theirs, flip).conj() * mine, signs).cpu().numpy() for flip, signs in groups]
    from unisono.quantum.kernels import pauli_strings_cpu

    block, alike = min(_SUM_BLOCK, len(mine)), mine.data_ptr() == theirs.data_ptr()
    threads = min(count(), len(mine) // block)
    flips, starts, signs = _flat(groups)
    out = np.zeros((threads, len(signs), 2))
    low, counters = _low_signs(signs, block, _parts(mine).dtype), np.zeros(1, np.int64)
    with workspace() as space:
        rooms = [space.tile(number, 2 * block, low.dtype).reshape(2, block) for number in range(threads)]

        def call(number: int) -> None:
            program = (flips, starts, signs, low, out[number], *rooms[number])
            pauli_strings_cpu.sums(_parts(mine), _parts(theirs), alike, *program, counters)

        together(call, threads)
    total = out.sum(axis=0)
    return np.split(total[:, 0] + 1j * total[:, 1], starts[1:-1])


def add_pauli_strings(into: torch.Tensor, theirs: torch.Tensor, groups: Sequence[Weighted]) -> None:
    """into[i ^ flip] += theirs[i] * sum over Pauli strings of factor * (-1)^popcount(i & sign), for each group."""
    if not _fast(into):
        for flip, signs, factors in groups:
            scale = torch.zeros_like(theirs)
            for sign, factor in zip(signs.tolist(), factors.tolist(), strict=True):
                scale.add_(_signs(len(theirs), sign, theirs), alpha=factor)
            into += flipped(theirs * scale, flip)
        return
    from unisono.quantum.kernels import pauli_strings_cpu

    block, part = min(_ADD_BLOCK, len(into)), _parts(into).dtype
    flips, starts, signs = _flat(groups)
    arriving = [_signs_at(signs, flip) * factors for flip, signs, factors in groups]
    factors = np.concatenate(arriving) if arriving else np.zeros(0, np.complex128)
    fixed, tables, places = _tables(starts, signs, factors, block, part)
    parts, counters = np.stack([factors.real, factors.imag], axis=1).astype(part), np.zeros(1, np.int64)
    threads = min(count(), len(into) // block)
    with workspace() as space:
        rooms = [space.tile(number, 2 * block, part).reshape(2, block) for number in range(threads)]

        def call(number: int) -> None:
            program = (flips, starts, signs, parts, fixed, tables, places, *rooms[number])
            pauli_strings_cpu.add(_parts(into), _parts(theirs), *program, counters)

        together(call, threads)


def _flat(groups: Sequence[Group] | Sequence[Weighted]) -> tuple[NDArray[np.int64], ...]:
    """What each group flips, where its Pauli strings begin (and the end of all), and all sign masks."""
    flips = np.array([group[0] for group in groups], np.int64)
    starts = np.cumsum([0, *(len(group[1]) for group in groups)]).astype(np.int64)
    return flips, starts, np.concatenate([np.zeros(0, np.int64), *(group[1] for group in groups)])


def _signs_at(signs: NDArray[np.int64], flip: int) -> NDArray[np.int64]:
    """What turns a sign of the amplitude that a Pauli string leaves into that of the one where it arrives."""
    return 1 - 2 * (np.bitwise_count(signs & flip).astype(np.int64) & 1)


def _tables(
    starts: NDArray[np.int64], signs: NDArray[np.int64], factors: NDArray[np.complex128], block: int, part: np.dtype
) -> tuple[NDArray, NDArray, NDArray[np.int64]]:
    """The arrays `fixed`, `tables` and `places` of pauli_strings_cpu.add."""
    fixed = np.zeros((len(starts) - 1, 2, block), part)
    rows: dict[int, int] = {0: 0}
    places = np.full(len(signs), -1, np.int64)
    for group, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
        for pauli_string in range(begin, end):
            low = int(signs[pauli_string]) & (block - 1)
            if signs[pauli_string] != low:
                places[pauli_string] = rows.setdefault(low, len(rows))
            else:
                row = _low_signs(signs[pauli_string : pauli_string + 1], block, part)[0]
                fixed[group, 0] += factors[pauli_string].real * row
                fixed[group, 1] += factors[pauli_string].imag * row
    return fixed, _low_signs(np.array([*rows], np.int64), block, part), places


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
    low = (masks[:, None] & (size - 1)).astype(np.int16) & np.arange(size, dtype=np.int16)  # no size is above 2^10
    return (1 - 2 * (np.bitwise_count(low).view(np.int8) & 1)).astype(dtype)


def _fast(amplitudes: torch.Tensor) -> bool:
    return amplitudes.device.type == "cpu" and importlib.util.find_spec("numba") is not None


def _parts(amplitudes: torch.Tensor) -> NDArray:
    return torch.view_as_real(amplitudes).view(-1).numpy()
