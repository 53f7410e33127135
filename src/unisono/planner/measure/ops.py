"""The clock by which ops are timed: what a layer is made of, on all ranks at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from unisono.comm.communicator import Communicator
from unisono.mesh.optimizers import fused
from unisono.mesh.random.draw import draw_fast
from unisono.mesh.random.state import RandomState
from unisono.plan.cost.op_time import IN_CACHE, OUTSIDE
from unisono.planner.measure.links import Care, Points

_SIDES = (16, 32, 64, 128, 256, 512)
_GPU_SIDES = (128, 512, 1024, 2048, 4096, 8192)
_FEW_ROWS = 8


class Clock:
    """Times things, all ranks together."""

    def __init__(self, comm: Communicator, device: torch.device, care: Care) -> None:
        self.comm = comm
        self.device = device
        self.care = care

    def time(self, call: Callable[[], Any]) -> float:
        """Seconds of a call: the best of some turns, for what else the machine does only adds to them."""
        once = min(self._turn(call, 1) for _ in range(4))  # the first of them also finds out how to
        loops = max(1, min(1000, int(self.care.turn / max(once, 1e-7))))
        if self.comm.size > 1:  # as often on all ranks
            loops = int(self.comm.all_reduce(torch.tensor([float(loops)]), "min").item())
        return min(self._turn(call, loops) for _ in range(self.care.rounds))

    def _turn(self, call: Callable[[], Any], loops: int) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self.comm.size > 1:
            self.comm.barrier()
        start = time.perf_counter()
        for _ in range(loops):
            call()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / loops

    def _random(self, *shape: int, dtype: torch.dtype, grad: bool = False) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=self.device, requires_grad=grad)

    def products(self, dtype: torch.dtype) -> list[tuple[float, float]]:
        """(operations of a call, operations a second) of layers' products."""
        points = []
        for side in _GPU_SIDES if self.device.type == "cuda" else _SIDES:
            x, w = self._random(4 * side, side, dtype=dtype), self._random(side, side, dtype=dtype)
            operations = 2.0 * 4 * side**3
            points.append(
                (operations, operations / self.time(partial(F.linear, x, w, self._random(side, dtype=dtype))))
            )
        return points

    def products_of_backward(self, dtype: torch.dtype) -> list[tuple[float, float]]:
        """The same, the mean of the two products of a backward: they lie otherwise in memory, and have no bias."""
        points = []
        for side in _SIDES:
            x, w = self._random(4 * side, side, dtype=dtype), self._random(side, side, dtype=dtype)
            operations = 2.0 * 4 * side**3
            taken = (self.time(partial(torch.mm, x, w)) + self.time(partial(torch.mm, x.t(), x))) / 2
            points.append((operations, operations / taken))
        return points

    def attentions(self, dtype: torch.dtype) -> Points:
        """(operations of a call, operations a second) on a GPU."""
        points = []
        for length in (512, 1024, 2048, 4096):
            q, k, v = self.queries_keys_values(2, length, 16, 64, dtype)
            operations = 4.0 * 2 * 16 * length**2 * 64
            taken = self.time(partial(F.scaled_dot_product_attention, q, k, v, is_causal=True))
            points.append((operations, operations / taken))
        return points

    def queries_keys_values(
        self, rows: int, length: int, heads: int, width: int, dtype: torch.dtype, grad: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Of one projection, as most models make them."""
        packed = self._random(rows, length, 3, heads, width, dtype=dtype, grad=grad)
        return packed.permute(2, 0, 3, 1, 4).unbind()

    def bandwidth(self) -> float:
        elements = 2**28 if self.device.type == "cuda" else 2**23
        x = torch.ones(elements, device=self.device)
        y = torch.empty_like(x)
        return 2 * x.nbytes / self.time(lambda: y.copy_(x))

    def library(self) -> float:
        """Bytes that libraries keep once they have computed."""
        torch.cuda.synchronize()
        return float(torch.cuda.memory_allocated())

    def overhead(self) -> float:
        """Of one op with next to nothing to do, half of what it takes forward and backward."""
        return self._kernel_overhead() if self.device.type == "cuda" else self._call_overhead()

    def _kernel_overhead(self) -> float:
        x = self._random(1, dtype=torch.float32, grad=True)

        def chain() -> None:
            y = x
            for _ in range(20):
                y = F.gelu(y)
            y.backward()

        return self.time(chain) / 40

    def _call_overhead(self) -> float:
        """Of the ops that layers are made of, called by modules, with parameters that get gradients."""
        layers = nn.Sequential(*(_LittleLayer(8) for _ in range(6)))
        x = self._random(1, 4, 8, dtype=torch.float32)

        def step() -> None:
            layers.zero_grad()
            layers(x).sum().backward()

        return self.time(step) / (2 * _LittleLayer.OPS * len(layers))

    def ops(self, dtype: torch.dtype, with_dropout: bool, peak: float) -> dict[str, tuple[float, float]]:
        """Bytes a second, forward and backward, as a trace counts them: inputs and outputs of the forward.

        peak: operations a second of large products."""
        is_gpu = self.device.type == "cuda"
        rows, width = (8192, 4096) if is_gpu else (512, 256)
        # Some take longer for larger numbers: those of layers with torch's first weights have a variance of 1/3.
        x = (self._random(rows, width, dtype=dtype) * 3**-0.5).requires_grad_()
        other = self._random(rows, width, dtype=dtype)
        weight, bias = (self._random(width, dtype=dtype, grad=True) for _ in range(2))
        classes = 8 * width if is_gpu else width
        logits = self._random(rows, classes, dtype=dtype, grad=True) if is_gpu else x
        targets = torch.randint(classes, (rows,), device=self.device)
        table = self._random(1024, width, dtype=dtype, grad=True)
        places = torch.randint(1024, (rows,), device=self.device)
        both = 2.0 * x.nbytes
        calls: dict[str, tuple[Callable[[], torch.Tensor], float]] = {
            "gelu": (lambda: F.gelu(x), both),
            "relu": (lambda: F.relu(x), both),
            "silu": (lambda: F.silu(x), both),
            "tanh": (lambda: torch.tanh(x), both),
            "add": (lambda: x + other, 1.5 * both),
            "mul": (lambda: x * other, 1.5 * both),
            "softmax": (lambda: F.softmax(x, -1), both),
            "layer_norm": (lambda: F.layer_norm(x, (width,), weight, bias), both),
            "rms_norm": (lambda: F.rms_norm(x, (width,), weight), both),
            "embedding": (lambda: F.embedding(places, table), both / 2),
            "cross_entropy_loss": (lambda: F.cross_entropy(logits, targets), float(logits.nbytes)),
            "reshape": (lambda: x.t().reshape(-1), both),
        }
        if is_gpu:  # rows that lie elsewhere in a message: large copies, unlike those of a transposed matrix
            calls["rows"] = (lambda: x.view(8, -1, width).transpose(0, 1).contiguous(), both)
        rates = {}
        with RandomState(0):
            for name, (call, moved) in calls.items():
                rates[name] = self._rate(call, moved)
            if with_dropout:
                draw_fast()
                rates["dropout"] = self._rate(lambda: F.dropout(x, 0.1), both, beside=self.dropout_overhead())
        if not is_gpu:
            rates["weights"] = self._weights(dtype, OUTSIDE, peak)
            rates["weights_in_cache"] = self._weights(dtype, IN_CACHE, peak)
        return rates

    def _weights(self, dtype: torch.dtype, size: int, peak: float) -> tuple[float, float]:
        """Bytes a second of weights of so many bytes, in products of few rows: of what these take, computing is not
        the weights'. A backward has two of them, the first layer's too."""
        wide, narrow = 2048, 512
        pairs = size // (2 * wide * narrow * dtype.itemsize)
        shapes = [(wide, narrow), (narrow, wide)] * pairs
        weights = [self._random(*shape, dtype=dtype, grad=True) for shape in shapes]
        few = self._random(_FEW_ROWS, narrow, dtype=dtype, grad=True)

        def chain() -> torch.Tensor:
            few.grad = None
            x = few
            for weight in weights:
                weight.grad = None  # else the backward adds to it, which is another's to count
                x = F.linear(x, weight)
            return x

        computing = sum(2.0 * _FEW_ROWS * weight.numel() for weight in weights) / peak
        moved = float(sum(weight.nbytes for weight in weights))
        forward, backward = self.passes(chain)
        return moved / max(forward - computing, forward / 4), moved / max(backward - 2 * computing, forward / 4)

    def dropout_overhead(self) -> float:
        """Of one with next to nothing to drop."""
        x = self._random(8, dtype=torch.float32)
        draw_fast()
        with RandomState(0):
            return self.time(lambda: F.dropout(x, 0.1))

    def _rate(self, call: Callable[[], torch.Tensor], moved: float, beside: float = 0.0) -> tuple[float, float]:
        """Forward, without the seconds that are `beside` its work, and backward."""
        forward, backward = self.passes(call)
        return moved / max(forward - beside, forward / 4), moved / max(backward, forward / 4)

    def passes(self, call: Callable[[], torch.Tensor]) -> tuple[float, float]:
        """Seconds forward and backward. Where another job disturbed the first, both may seem to take less than it."""
        forward = self.time(call)
        gradient = torch.ones_like(call())
        whole = self.time(lambda: call().backward(gradient))
        return forward, max(whole - forward, forward / 4)

    def optimizer(self, foreach: bool | None = None) -> float:
        """Bytes a second of AdamW, which reads four and writes three numbers for each parameter: stepped as a trainer
        does it, or (foreach=False) as torch does op by op. There are more of them than caches hold."""
        size = 2**22 if self.device.type == "cuda" else 2**18
        parameters = [nn.Parameter(torch.randn(size, device=self.device)) for _ in range(16)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=foreach)

        def step() -> None:
            with fused(optimizer):
                optimizer.step()

        return 28.0 * size * 16 / self.time(step)


class _LittleLayer(nn.Module):
    OPS = 6

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.linear(self.norm(x)))
        return x + y.unflatten(-1, (2, -1)).flatten(-2)
