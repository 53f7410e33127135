"""Sums of squared moduli, in float64: added up in pieces, each short enough for its own precision."""

from __future__ import annotations

import importlib.util

import torch

_PIECE = 1 << 19  # numbers


def squares(amplitudes: torch.Tensor) -> torch.Tensor:
    """Of any part of a state: at the speed of memory where it lies in long runs, evenly apart."""
    numbers = torch.view_as_real(amplitudes)
    if numbers.device.type == "cpu" and (runs := _runs(numbers)) is not None:
        from unisono.quantum.kernels import squares as kernel

        flat = numbers.as_strided(((runs[2] - 1) * runs[1] + runs[0],), (1,)).numpy()
        if runs[0] % kernel.LEAST == 0:
            return torch.tensor(kernel.squares(flat, 0, *runs), dtype=torch.float64)
    if not numbers.is_contiguous():
        return torch.linalg.vector_norm(numbers, dtype=torch.float64) ** 2
    norms = [torch.linalg.vector_norm(piece) for piece in numbers.view(-1).split(_PIECE)]
    return torch.stack(norms).double().square().sum()


def _runs(numbers: torch.Tensor) -> tuple[int, int, int] | None:
    """How long the runs are, how far apart they begin, and how many there are; None: nothing so simple."""
    if numbers.numel() < _PIECE or importlib.util.find_spec("numba") is None:
        return None
    run = 1
    dims = [(size, stride) for size, stride in zip(numbers.shape, numbers.stride(), strict=True) if size > 1]
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    if not dims:
        return run, run, 1
    return (run, dims[0][1], dims[0][0]) if len(dims) == 1 else None
