"""A draw: one call for random numbers, which any rank can repeat for its own elements.

`words` chooses the implementation of Philox: triton on GPUs; on CPUs torch's operations, and numba once enough has been
drawn that compiling pays.

Normal numbers have the same bits on every CPU, and agree to rounding on GPUs, which fuse operations: logarithm and
cosine differ in their last bits between math libraries, so they are computed here from sums, products, quotients and
square roots, which IEEE 754 defines to the last bit.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from unisono.errors import UsageError
from unisono.mesh.global_index import Part, Runs, runs_of
from unisono.mesh.random.philox import PhiloxStream, torch_words

if TYPE_CHECKING:
    from unisono.mesh.random.step_keys import StepKeys

# How many random bits a number in [0, 1) of each dtype has.
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
DTYPES = tuple(_BITS)
_WORTH_COMPILING = 0.5  # seconds of this thread; numba takes one or two to be loaded, and as long to compile once
_seconds_drawn = 0.0
_LOG_TERMS = 12
_TURN_TERMS = 9


@dataclass(frozen=True, eq=False)
class Draw:
    """One call for random numbers: can be repeated at any time, with the same outcome."""

    identity: tuple[object, ...]
    shape: tuple[int, ...]
    parts: Mapping[int, Part]
    keys: StepKeys | None = None  # which give its streams

    @property
    def runs(self) -> Runs:
        return runs_of(self.shape, self.parts)

    def stream(self, lane: int = 0) -> PhiloxStream:
        stream_of = PhiloxStream.of if self.keys is None else self.keys.stream
        return stream_of(*self.identity, lane)

    def words(self, device: torch.device, lane: int = 0) -> torch.Tensor:
        """Random int32 words in the shape of the call; lanes are independent of each other."""
        if device.type == "meta":
            return torch.empty(self.shape, dtype=torch.int32, device=device)
        return words(self.stream(lane), self.runs, device).view(self.shape)

    def uniform(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Numbers in [0, 1)."""
        if dtype not in _BITS:
            raise UsageError(f"random numbers of {dtype}; expected one of {', '.join(map(str, _BITS))}")
        if dtype == torch.float64:
            high, low = self.words(device) >> 5, self.words(device, 1) >> 6
            return ((high + 2**26).double() * 2.0**26 + (low + 2**25).double()) * 2.0**-53
        bits = _BITS[dtype]
        return (((self.words(device) >> (32 - bits)) + 2 ** (bits - 1)).float() * 2.0**-bits).to(dtype)

    def normal(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        first = self.uniform(torch.float64, device)
        second = replace(self, identity=(*self.identity, "second")).uniform(torch.float64, device)
        return normal_from_uniform(first, second).to(dtype)

    def keep(self, p: float, device: torch.device) -> torch.Tensor:
        """True with probability 1 - p: what a dropout of p keeps."""
        return self.words(device) >= drop_limit(p)


def drop_limit(p: float) -> int:
    """Words below this are dropped."""
    return min(round(p * 2**32) - 2**31, 2**31 - 1)


# ---- the implementations of Philox -----------------------------------------------------------------------------------


def words(stream: PhiloxStream, runs: Runs, device: torch.device) -> torch.Tensor:
    """The int32 words of all elements of `runs`, in order, flat."""
    global _seconds_drawn
    if runs.count == 0:
        return torch.empty(0, dtype=torch.int32, device=device)
    if device.type == "cuda" and (gpu := gpu_kernels()) is not None:
        return gpu.words(stream, runs, device)
    if stream.row is not None:
        where = device.type + (" without triton" if device.type == "cuda" else "")
        raise UsageError(
            f"cudagraph=True, but the model draws random numbers on {where}, which a replayed step would not draw "
            "anew; draw them on the GPU, as torch.rand(..., device=x.device), or leave cudagraph out"
        )
    if device.type != "cpu":
        return torch_words(stream, runs, device)
    if (cpu := compiled()) is not None:
        return cpu.words(stream, runs)
    start = time.thread_time()  # other processes on the same cores must not bring numba into this one
    drawn = torch_words(stream, runs, device)
    _seconds_drawn += time.thread_time() - start
    return drawn


def compiled() -> ModuleType | None:
    """The kernels for CPUs, once enough has been drawn that compiling them pays."""
    return cpu_kernels() if _seconds_drawn > _WORTH_COMPILING else None


def draw_fast() -> None:
    """Use the compiled kernels from now on, as a process does that has drawn for a while."""
    global _seconds_drawn
    _seconds_drawn = math.inf


@cache
def gpu_kernels() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from unisono.mesh.random import philox_gpu

    return philox_gpu


@cache
def cpu_kernels() -> ModuleType | None:
    if importlib.util.find_spec("numba") is None:
        return None
    from unisono.mesh.random import philox_cpu

    return philox_cpu


# ---- normal numbers --------------------------------------------------------------------------------------------------


def normal_from_uniform(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The Box-Muller transform of float64 numbers in [0, 1)."""
    return _sqrt_of(-2 * log(1 - first)) * cos_of_turns(second)


def _sqrt_of(x: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(x.clamp_min(0.0))


def log(x: torch.Tensor) -> torch.Tensor:
    """The natural logarithm of positive numbers: of the exponent, and of the rest m as 2 artanh((m - 1) / (m + 1))."""
    rest, exponent = torch.frexp(x)
    small = rest < math.sqrt(0.5)
    rest = torch.where(small, rest * 2, rest)
    exponent = exponent.double() - small.double()
    ratio = (rest - 1) / (rest + 1)
    square = ratio * ratio
    series = torch.full_like(x, 1 / (2 * _LOG_TERMS + 1))
    for term in range(_LOG_TERMS - 1, -1, -1):
        series = series * square
        series = series + 1 / (2 * term + 1)
    return exponent * math.log(2) + 2 * ratio * series


def cos_of_turns(x: torch.Tensor) -> torch.Tensor:
    """cos(2 pi x) for x in [0, 1), from Taylor's series of cosine and sine on [0, pi/4]."""
    x = torch.where(x > 0.5, 1 - x, x)  # the other half mirrors
    sign = 1 - 2 * (x > 0.25).to(x.dtype)  # where() would copy its numbers to a GPU, and wait
    x = torch.where(x > 0.25, 0.5 - x, x)
    angle = torch.where(x > 0.125, 0.25 - x, x) * (2 * math.pi)
    square = angle * angle
    cosine = _alternating(square, 0)
    sine = angle * _alternating(square, 1)
    return sign * torch.where(x > 0.125, sine, cosine)


def _alternating(square: torch.Tensor, first: int) -> torch.Tensor:
    """The sum over k of (-square)**k / (2 k + first)!"""
    total = torch.full_like(square, (-1) ** _TURN_TERMS / math.factorial(2 * _TURN_TERMS + first))
    for term in range(_TURN_TERMS - 1, -1, -1):
        total = total * square
        total = total + (-1) ** term / math.factorial(2 * term + first)
    return total
