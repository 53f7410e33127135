"""The order of samples in an epoch: a function of (seed, epoch, number of samples), whatever the plan, the number of
ranks and the version of torch.

    taken = order(len(dataset), seed=1, epoch=0)
    taken[64:128]                             # the indices of the second batch of 64

Up to a million samples, each gets a random 64-bit number, and sorting these gives the order: all indices are in memory.
Of more, the order is computed where it is asked for: ten million samples take no more memory than ten thousand.

Note: the computed order. A permutation of n positions is made from one of a square, side * side >= n, in which position
x is (left, right) = divmod(x, side). A round of a Feistel network, (left, right) -> (right, left + hash(right) mod
side), can be undone, whatever the hash is, so the network is a permutation of the square. A position that it sends to n
or beyond is sent on until it comes to one below n: its cycle has one, the position itself. As no two positions come to
the same one, the walk is a permutation of the n (Black and Rogaway: Ciphers with arbitrary finite domains, 2002). The
square has at most 2 sqrt(n) + 1 positions more than n, so hardly any position walks.
"""

from __future__ import annotations

import hashlib
import math
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from unisono.mesh.global_index import runs_of
from unisono.mesh.random.philox import PhiloxStream, torch_words

COMPUTED_ABOVE = 1 << 20  # samples
_BLOCK = 1 << 14  # positions that are computed at once: some milliseconds
_BLOCKS_KEPT = 2  # a loader with workers reads at two positions, one ahead of the other
_ROUNDS = 8

Words = npt.NDArray[np.uint64]


class SampleOrder(Protocol):
    """The samples of an epoch by position."""

    def __getitem__(self, positions: slice, /) -> torch.Tensor:
        """The indices of the samples at these positions, an int64 tensor."""


def order(samples: int, seed: int, epoch: int, shuffle: bool = True, *, is_computed: bool | None = None) -> SampleOrder:
    """The indices of all samples in the order of an epoch.

    is_computed: whether positions are computed as they are read, and not kept; default: with more than
        `COMPUTED_ABOVE` samples. The two are different orders.
    """
    if not shuffle:
        return Unshuffled(samples)
    if samples > COMPUTED_ABOVE if is_computed is None else is_computed:
        return ComputedOrder(samples, "order of samples", seed, epoch, samples)
    # Compiled words would save a tenth of a second an epoch at most, and cost the 100 MiB of numba.
    drawn, cpu = runs_of((samples,), {}), torch.device("cpu")
    high, low = (torch_words(PhiloxStream.of("order of samples", seed, epoch, lane), drawn, cpu) for lane in (0, 1))
    return ((high.long() << 32) | (low.long() & 0xFFFFFFFF)).argsort(stable=True)


class Unshuffled:
    """Samples in the dataset's own order."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __getitem__(self, positions: slice) -> torch.Tensor:
        return torch.arange(*positions.indices(self.samples))


class ComputedOrder:
    """A random permutation of `samples` positions; different identities give unrelated ones."""

    def __init__(self, samples: int, *identity: object) -> None:
        self.samples = samples
        self._side = max(math.isqrt(samples - 1) + 1, 1)
        digest = hashlib.blake2b("\0".join(map(str, identity)).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        self._kept: dict[int, torch.Tensor] = {}  # blocks by number, the newest last

    def __getitem__(self, positions: slice) -> torch.Tensor:
        start, stop, step = positions.indices(self.samples)
        assert step == 1, "of positions in a row"
        if start >= stop:
            return torch.empty(0, dtype=torch.int64)
        parts = [
            self._block(number)[max(start - number * _BLOCK, 0) : stop - number * _BLOCK]
            for number in range(start // _BLOCK, (stop - 1) // _BLOCK + 1)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _block(self, number: int) -> torch.Tensor:
        if number not in self._kept:
            while len(self._kept) >= _BLOCKS_KEPT:
                self._kept.pop(next(iter(self._kept)))
            positions = np.arange(number * _BLOCK, min((number + 1) * _BLOCK, self.samples), dtype=np.uint64)
            self._kept[number] = torch.from_numpy(self._walked(positions).astype(np.int64))
        return self._kept[number]

    def _walked(self, positions: Words) -> Words:
        found = self._permuted(positions)
        while len(beyond := np.flatnonzero(found >= self.samples)):
            found[beyond] = self._permuted(found[beyond])
        return found

    def _permuted(self, positions: Words) -> Words:
        """Of the square."""
        side = np.uint64(self._side)
        left, right = positions // side, positions % side
        for key in self._keys:
            moved = left + ((_hash(right, key) >> np.uint64(32)) * side >> np.uint64(32))
            left, right = right, np.where(moved >= side, moved - side, moved)
        return left * side + right


def _hash(numbers: Words, key: np.uint64) -> Words:
    """Random 64-bit words: the output function of SplitMix64 (Steele, Lea and Flood, 2014); sums and products wrap."""
    mixed = numbers + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
