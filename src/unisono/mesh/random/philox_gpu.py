"""Philox for GPUs, in triton: random words, and a dropout that draws its mask in registers and keeps none.

The bits are those of `philox.torch_words`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.mesh.global_index import Runs
from unisono.mesh.random.philox import PhiloxStream

_BLOCK = 1024


@triton.jit
def _mix(number, key0, key1, counter0, counter1):  # type: ignore[no-untyped-def]
    c0 = (number & 0xFFFFFFFF).to(tl.uint32)
    c1 = (number >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0) + counter0.to(tl.uint32, bitcast=True)
    c3 = tl.zeros_like(c0) + counter1.to(tl.uint32, bitcast=True)
    k0 = tl.zeros_like(c0) + key0.to(tl.uint32, bitcast=True)
    k1 = tl.zeros_like(c0) + key1.to(tl.uint32, bitcast=True)
    m0 = tl.full(c0.shape, 0xD2511F53, tl.uint32)
    m1 = tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(m0, c0), m0 * c0
        high1, low1 = tl.umulhi(m1, c2), m1 * c2
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 = k0 + tl.full(c0.shape, 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full(c0.shape, 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _word_of(  # type: ignore[no-untyped-def]
    offset, starts, start, count, length, key0, key1, counter0, counter1, SINGLE: tl.constexpr
):
    """The word of each element, one evaluation an element: runs may begin anywhere in a block of four."""
    if SINGLE:
        number = start.to(tl.int64) + offset
    else:
        number = tl.load(starts + offset // length, mask=offset < count, other=0) + offset % length
    c0, c1, c2, c3 = _mix(number >> 2, key0, key1, counter0, counter1)
    lane = number & 3
    return tl.where(lane < 2, tl.where(lane == 0, c0, c1), tl.where(lane == 2, c2, c3)).to(tl.int32, bitcast=True)


@triton.jit
def _words_of_blocks(first, key0, key1, counter0, counter1, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The words of BLOCK elements from a multiple of four on, one evaluation for four elements."""
    c0, c1, c2, c3 = _mix(first // 4 + tl.arange(0, BLOCK // 4), key0, key1, counter0, counter1)
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [BLOCK]).to(tl.int32, bitcast=True)


_VARYING = ["start", "count", "length", "key0", "key1", "counter0", "counter1", "limit", "scale"]


@triton.jit(do_not_specialize=_VARYING)
def _kernel(  # type: ignore[no-untyped-def]
    x,
    out,
    limit,
    scale,
    starts,
    start,
    count,
    length,
    key0,
    key1,
    counter0,
    counter1,
    row,
    FROM_ROW: tl.constexpr,
    SINGLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """The words of the elements, or with DROPOUT the elements of x, those whose word is below `limit` made 0.

    With FROM_ROW the stream is in memory, because it is not known yet when the kernel is launched: see step_keys.py."""
    if FROM_ROW:
        key0, key1 = tl.load(row), tl.load(row + 1)
        counter0, counter1 = tl.load(row + 2), tl.load(row + 3)
    begin = tl.program_id(0).to(tl.int64) * BLOCK if WIDE else tl.program_id(0) * BLOCK
    offset = begin + tl.arange(0, BLOCK)
    if ALIGNED:
        word = _words_of_blocks(start.to(tl.int64) + begin, key0, key1, counter0, counter1, BLOCK)
    else:
        word = _word_of(offset, starts, start, count, length, key0, key1, counter0, counter1, SINGLE)
    if DROPOUT:
        value = tl.load(x + offset, mask=offset < count, other=0.0)
        kept = tl.where(word >= limit, value.to(tl.float32) * scale, 0.0)
        tl.store(out + offset, kept.to(value.dtype), mask=offset < count)
    else:
        tl.store(out + offset, word, mask=offset < count)


def words(stream: PhiloxStream, runs: Runs, device: torch.device) -> torch.Tensor:
    out = torch.empty(runs.count, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        _kernel[_grid(runs)](out, out, 0, 1.0, **_arguments(stream, runs, device), DROPOUT=False)
    return out


def dropout(x: torch.Tensor, stream: PhiloxStream, runs: Runs, limit: int, scale: float) -> torch.Tensor:
    """x with the elements whose word is below `limit` made 0, and the others scaled, in float32."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if runs.count:
        with torch.cuda.device(x.device):
            _kernel[_grid(runs)](x, out, limit, scale, **_arguments(stream, runs, x.device), DROPOUT=True)
    return out


def _grid(runs: Runs) -> tuple[int]:
    return (-(-runs.count // _BLOCK),)


def _arguments(stream: PhiloxStream, runs: Runs, device: torch.device) -> dict[str, object]:
    single = len(runs.starts) == 1
    start = int(runs.starts[0]) if single else 0
    key0, key1, counter0, counter1 = stream.words
    return {
        "starts": None if single else runs.starts_on(device),
        "start": start,
        "count": runs.count,
        "length": runs.length,
        "key0": key0,
        "key1": key1,
        "counter0": counter0,
        "counter1": counter1,
        "row": stream.row,
        "FROM_ROW": stream.row is not None,
        "SINGLE": single,
        "ALIGNED": single and start % 4 == 0,
        "BLOCK": _BLOCK,
        "WIDE": runs.count > (1 << 31) - _BLOCK,  # else 32-bit divisions do, which are far quicker
    }
