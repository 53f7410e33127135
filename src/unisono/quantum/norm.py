"""The sum of squared moduli of any part of a state."""

from __future__ import annotations

import importlib.util

import torch

_PIECE = 1 << 19  # numbers whose squares are added in their own precision


def squares(amplitudes: torch.Tensor) -> torch.Tensor:
    """In float64: added up in pieces, each short enough for its own precision."""
    parts = torch.view_as_real(amplitudes)
    if amplitudes.is_contiguous():
        parts = parts.view(-1)
        if len(parts) >= _PIECE and parts.device.type == "cpu" and importlib.util.find_spec("numba") is not None:
            from unisono.quantum.kernels.squares import squares as fast

            return torch.tensor(fast(parts.numpy()), dtype=torch.float64)
    norms = [torch.linalg.vector_norm(piece) for piece in parts.split(_PIECE)]
    return torch.stack(norms).double().square().sum()
