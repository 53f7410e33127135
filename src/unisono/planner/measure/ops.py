"""Times ops on all ranks at the same time: products, attention, copies and small ops."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from unisono.comm.communicator import Communicator

Points = list[tuple[float, float]]  # (FLOPs of a call, FLOPs a second)

_SIDES = (16, 64, 256, 512)  # of matrices
_GPU_SIDES = (128, 512, 1024, 2048, 4096, 8192)
_LENGTHS = (16, 64, 256)  # of sequences
_GPU_LENGTHS = (512, 1024, 2048, 4096)


class Clock:
    """Times calls, on all ranks together: they share memory bandwidth and caches, as they will in training."""

    def __init__(self, comm: Communicator, device: torch.device, rounds: int, seconds: float) -> None:
        """rounds: of which the best counts; seconds: that one of them lasts at least."""
        self.comm = comm
        self.device = device
        self.is_gpu = device.type == "cuda"
        self._rounds = rounds
        self._seconds = seconds

    def time(self, call: Callable[[], Any]) -> float:
        """Seconds of a call: the best round, because other jobs on the machine only add to it."""
        once = min(self._round(call, 1) for _ in range(3))  # the first of them is a warm-up
        loops = max(1, min(1000, int(self._seconds / max(once, 1e-7))))
        if self.comm.size > 1:  # as often on all ranks
            loops = int(self.comm.all_reduce(torch.tensor([float(loops)]), "min").item())
        return min(self._round(call, loops) for _ in range(self._rounds))

    def _round(self, call: Callable[[], Any], loops: int) -> float:
        if self.is_gpu:
            torch.cuda.synchronize()
        if self.comm.size > 1:
            self.comm.barrier()
        start = time.perf_counter()
        for _ in range(loops):
            call()
        if self.is_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / loops

    def _random(self, *shape: int, dtype: torch.dtype, grad: bool = False) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=self.device, requires_grad=grad)

    def products(self, dtype: torch.dtype) -> Points:
        """Of linear layers."""
        points = []
        for side in _GPU_SIDES if self.is_gpu else _SIDES:
            x, w = self._random(4 * side, side, dtype=dtype), self._random(side, side, dtype=dtype)
            flops = 2.0 * 4 * side**3
            points.append((flops, flops / self.time(partial(F.linear, x, w, self._random(side, dtype=dtype)))))
        return points

    def attentions(self, dtype: torch.dtype) -> Points:
        points = []
        for length in _GPU_LENGTHS if self.is_gpu else _LENGTHS:
            rows, heads, width = (2, 16, 64) if self.is_gpu else (2, 4, 32)
            packed = self._random(rows, length, 3, heads, width, dtype=dtype)  # one projection, as most models have
            q, k, v = packed.permute(2, 0, 3, 1, 4).unbind()
            flops = 4.0 * rows * heads * length**2 * width
            taken = self.time(partial(F.scaled_dot_product_attention, q, k, v, is_causal=True))
            points.append((flops, flops / taken))
        return points

    def bandwidth(self) -> float:
        """Bytes a second of a copy."""
        x = torch.ones(2**28 if self.is_gpu else 2**22, device=self.device)
        y = torch.empty_like(x)
        return 2 * x.nbytes / self.time(lambda: y.copy_(x))

    def elementwise(self, dtype: torch.dtype) -> float:
        """Bytes a second that usual elementwise ops read and write, forward and backward."""
        rows, width = (8192, 4096) if self.is_gpu else (256, 256)
        x, other = self._random(rows, width, dtype=dtype, grad=True), self._random(rows, width, dtype=dtype)
        weight, bias = (self._random(width, dtype=dtype, grad=True) for _ in range(2))
        gradient = torch.ones_like(other)
        calls: list[Callable[[], torch.Tensor]] = [
            lambda: F.gelu(x),
            lambda: F.layer_norm(x, (width,), weight, bias),
            lambda: F.relu(x),
            lambda: x + other,
        ]
        rates = [4.0 * other.nbytes / self.time(partial(_forward_and_backward, call, gradient)) for call in calls]
        return statistics.geometric_mean(rates)

    def overhead(self) -> float:
        """Seconds of one op with next to nothing to compute, the mean of its forward and its backward."""
        return self._launch_overhead() if self.is_gpu else self._call_overhead()

    def _launch_overhead(self) -> float:
        x = self._random(1, dtype=torch.float32, grad=True)

        def chain() -> None:
            y = x
            for _ in range(20):
                y = F.gelu(y)
            y.backward()

        return self.time(chain) / 40

    def _call_overhead(self) -> float:
        """Of the ops of small layers, called by modules, with parameters that get gradients."""
        layers = nn.Sequential(*(_SmallLayer(8) for _ in range(6)))
        x = self._random(1, 4, 8, dtype=torch.float32)

        def step() -> None:
            layers.zero_grad()
            layers(x).sum().backward()

        return self.time(step) / (2 * _SmallLayer.OPS * len(layers))


def _forward_and_backward(call: Callable[[], torch.Tensor], gradient: torch.Tensor) -> None:
    call().backward(gradient)


class _SmallLayer(nn.Module):
    OPS = 6

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.linear(self.norm(x)))
        return x + y.unflatten(-1, (2, -1)).flatten(-2)
