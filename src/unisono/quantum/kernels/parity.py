"""Whether a word has an odd number of bits, inside kernels."""

from __future__ import annotations

from numba import njit


@njit(nogil=True, error_model="numpy")
def parity(word):  # type: ignore[no-untyped-def]
    """1 for an odd number of bits, else 0."""
    word ^= word >> 32
    word ^= word >> 16
    word ^= word >> 8
    word ^= word >> 4
    word ^= word >> 2
    word ^= word >> 1
    return word & 1
