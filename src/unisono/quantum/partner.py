"""Amplitudes of a partner: the rank whose held index differs in some bits, and indices that differ in some bits."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from unisono.quantum.state import State


def partner_chunks(state: State, flip: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The amplitudes of the rank whose held index differs by `flip`, a chunk at a time, with each chunk's place."""
    width = 1 << ((max(1, state.chunk // (4 * state.local.element_size()))).bit_length() - 1)
    width = min(width, len(state.local))
    partner = state.holdings.rank_of(int(state.holdings.table[state.rank]) ^ flip)
    for place in range(0, len(state.local), width):
        mine = state.local[place : place + width]
        if flip and state.comm is not None:
            theirs = torch.empty_like(mine)
            state.comm.exchange([(mine, partner)], [(theirs, partner)])
            yield place, theirs
        else:
            yield place, mine


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
