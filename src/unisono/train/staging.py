"""Staging: tensors copied to host memory, so that training may go on while they are written.

The memory is kept for the next time: fresh pages cost more than the copy itself. Where tensors come from a GPU it is
pinned, and the copies run at the speed of the bus.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ALIGNMENT = 64


class Staging:
    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copied(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies that hold until the next call."""
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        self._grow(sum(sizes), pinned=on_gpu)
        copies, first = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            room = self._memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            room.copy_(tensor, non_blocking=tensor.is_cuda)
            copies.append(room)
            first += size
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    def _grow(self, size: int, pinned: bool) -> None:
        if len(self._memory) < size or (pinned and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old goes before the new comes
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
