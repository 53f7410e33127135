"""Pauli sums on a state that one GPU holds: their values, and what they make of the state."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.quantum.kernels.gpu import THREADS, kernel_of, real_of
from unisono.quantum.words import Words

_BLOCKS = 8  # of a multiprocessor


class GpuWords(Words):
    """`Words` with the state, and what is made of it, on a GPU."""

    def _call(self, groups: list[Any], local: torch.Tensor, made: torch.Tensor | None) -> NDArray[np.float64]:
        device, real = local.device, real_of(local.dtype)
        flat = [term for _, terms in groups for term in terms]
        factors = np.array([(factor.real, factor.imag) for _, factor in flat]).reshape(-1)
        program = [
            _sent([flip for flip, _ in groups], torch.int64, device),
            _sent([sign for sign, _ in flat], torch.int64, device),
            _sent(np.cumsum([0, *(len(terms) for _, terms in groups)]), torch.int32, device),
            _sent(factors, real, device),
        ]
        count = _BLOCKS * torch.cuda.get_device_properties(device).multi_processor_count
        blocks = max(1, min(count, len(local) // THREADS))

        def launch(name: str, out: torch.Tensor, number: int) -> None:
            with torch.cuda.device(device):
                kernel = kernel_of("words.cu", name, local.dtype, device)
                args = [local, out, *program, number, self.bits]
                kernel(grid=(blocks, 1, 1), block=(THREADS, 1, 1), args=args)

        if made is not None:
            launch("apply_words", made, len(groups))
            return np.zeros(0)
        values = torch.zeros(len(groups), dtype=torch.float64, device=device)
        sums = torch.zeros(blocks * THREADS, dtype=torch.float64, device=device)
        for group in range(len(groups)):
            launch("word_values", sums, group)
            values[group] = sums.sum()
        return values.cpu().numpy()


def _sent(numbers: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor([*numbers, 0], dtype=dtype, device=device)  # never empty: kernels take its address
