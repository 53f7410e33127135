"""Philox 4x32-10: random words from a counter, so that word number i can be had without the words before it.

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC'11). A counter of four 32-bit words is
mixed with a key of two in ten rounds. Here the counter is (element number / 4, in two words; a stream, in two words),
and element i takes word i mod 4 of its block. Words are int32, all 2**32 of them equally likely.

Three implementations give the same bits: this one in torch's integer operations, for every device; philox_cpu.py in
numba; philox_gpu.py in triton. draw.py chooses between them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from unisono.mesh.global_index import Runs

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LOW = 0xFFFFFFFF

_BLOCKS_AT_ONCE = 65536  # keeps the working set in the cache


@dataclass(frozen=True)
class PhiloxStream:
    """One sequence of random words; different identities give unrelated sequences."""

    key: tuple[int, int]
    counter: tuple[int, int]
    row: torch.Tensor | None = field(default=None, compare=False)  # where a GPU reads `words` instead: see step_keys.py

    @classmethod
    def of(cls, *identity: object) -> PhiloxStream:
        digest = hashlib.blake2b("\0".join(map(str, identity)).encode(), digest_size=16).digest()
        a, b, c, d = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8, 12))
        return cls((a, b), (c, d))

    @property
    def words(self) -> list[int]:
        """Key and counter as four int32."""
        return [word - (1 << 32) if word >> 31 else word for word in (*self.key, *self.counter)]


def torch_words(stream: PhiloxStream, runs: Runs, device: torch.device) -> torch.Tensor:
    """The int32 words of all elements of `runs`, in order, flat."""
    starts = runs.starts_on(device)
    lanes = starts & 3
    aligned = int(lanes.max()) == 0 if len(starts) > 1 else int(lanes) == 0
    blocks_per_run = (runs.length + (0 if aligned else 3) + 3) // 4
    if len(starts) == 1:
        blocks = (int(starts) >> 2) + torch.arange(blocks_per_run, device=device)
    else:
        blocks = ((starts >> 2)[:, None] + torch.arange(blocks_per_run, device=device)).reshape(-1)
    out = torch.empty(len(blocks), 4, dtype=torch.int32, device=device)
    step = _BLOCKS_AT_ONCE if device.type == "cpu" else len(blocks)
    for first in range(0, len(blocks), step):
        part = slice(first, first + step)
        for lane, word in enumerate(mix(stream, blocks[part])):
            out[part, lane] = word
    rows = out.view(len(starts), blocks_per_run * 4)
    if aligned:
        return rows[:, : runs.length].reshape(-1)
    if len(starts) == 1:
        return rows[0, int(lanes) : int(lanes) + runs.length]
    return rows.gather(1, lanes[:, None] + torch.arange(runs.length, device=device)).reshape(-1)


def mix(stream: PhiloxStream, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four words of each block (int64 numbers), as the low halves of int64 numbers.

    A product of two 32-bit words wraps around in int64, which loses nothing: its 64 bits are the product's. Words that
    are only xored keep the bits above their 32 until these are masked away.
    """
    k0, k1 = stream.key
    c0, c1 = blocks & LOW, blocks >> 32
    c2, c3 = torch.full_like(blocks, stream.counter[0]), torch.full_like(blocks, stream.counter[1])
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = (p1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(LOW)
        c2 = (p0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(LOW)
        c1, c3 = p1, p0
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return c0, c1, c2, c3
