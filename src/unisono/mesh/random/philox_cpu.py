"""Philox for CPUs, compiled by numba. The bits are those of `philox.torch_words`."""

from __future__ import annotations

import numpy as np
import torch

from unisono.kernel_files import kept
from unisono.mesh.global_index import Runs
from unisono.mesh.random.philox import MULTIPLIERS, ROUNDS, WEYL, PhiloxStream

_M0, _M1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_W0, _W1 = np.uint32(WEYL[0]), np.uint32(WEYL[1])
_HALF = np.uint64(32)


def words(stream: PhiloxStream, runs: Runs) -> torch.Tensor:
    out = torch.empty(runs.count, dtype=torch.int32, device="cpu")
    identity = tuple(np.uint32(word) for word in (*stream.key, *stream.counter))
    _fill(out.numpy().view(np.uint32), runs.starts.numpy(), runs.length, *identity)
    return out


def noise(stream: PhiloxStream, runs: Runs, limit: int, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """`scale` where the word is at least `limit`, which a dropout keeps, and 0 elsewhere; flat."""
    drawn = words(stream, runs).numpy()
    out = torch.empty(runs.count, dtype=dtype, device="cpu")
    _compare(drawn, np.int32(limit), out.numpy(), out.numpy().dtype.type(scale))
    return out


@kept(nogil=True)
def _compare(drawn, limit, out, scale):  # type: ignore[no-untyped-def]
    nothing = scale - scale
    for i in range(len(drawn)):
        out[i] = scale if drawn[i] >= limit else nothing


@kept(inline="always")
def _block(number, key0, key1, counter0, counter1):  # type: ignore[no-untyped-def]
    c0, c1 = np.uint32(number), np.uint32(np.uint64(number) >> _HALF)
    c2, c3 = counter0, counter1
    k0, k1 = key0, key1
    for _ in range(ROUNDS):
        p0, p1 = np.uint64(c0) * _M0, np.uint64(c2) * _M1
        c0 = np.uint32(np.uint32(p1 >> _HALF) ^ c1 ^ k0)
        c2 = np.uint32(np.uint32(p0 >> _HALF) ^ c3 ^ k1)
        c1, c3 = np.uint32(p1), np.uint32(p0)
        k0, k1 = np.uint32(k0 + _W0), np.uint32(k1 + _W1)
    return c0, c1, c2, c3


@kept(nogil=True)
def _fill(out, starts, length, key0, key1, counter0, counter1):  # type: ignore[no-untyped-def]
    for run in range(len(starts)):
        begin = run * length
        lead = min((4 - starts[run] % 4) % 4, length)  # elements before the first full block
        blocks = (length - lead) // 4
        if lead:
            mixed = _block(starts[run] // 4, key0, key1, counter0, counter1)
            for i in range(lead):
                out[begin + i] = mixed[starts[run] % 4 + i]
        first = (starts[run] + lead) // 4
        for block in range(blocks):
            w0, w1, w2, w3 = _block(first + block, key0, key1, counter0, counter1)
            at = begin + lead + 4 * block
            out[at], out[at + 1], out[at + 2], out[at + 3] = w0, w1, w2, w3
        done = lead + 4 * blocks
        if done < length:
            mixed = _block(first + blocks, key0, key1, counter0, counter1)
            for i in range(length - done):
                out[begin + done + i] = mixed[i]
