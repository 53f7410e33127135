"""The simulated transport: the other ranks do not exist, and each is taken to have what this one has.

Operations take no time, but for one copy where something must arrive, so that what is computed from it is numbers and
not uninitialised memory. What arrives from one other rank, which may do something else altogether, is random numbers.
Small sums, by which programs decide what to do next, are those of ranks that are all alike. Meta tensors may take part
in everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed as dist

from unisono.comm.operation import Message, Transfer
from unisono.comm.reduction import Factor

_FEW = 1024  # elements, up to which a sum is computed
_PATTERN = 4093  # random numbers that are repeated in all that arrives

Tensor = torch.Tensor


class SimulatedTransport:
    is_simulated = True

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)

    def broadcast(self, tensor: Tensor, root: int) -> Transfer:
        return _over()

    def all_reduce(self, tensor: Tensor, op: str, factor: Factor | None) -> Transfer:
        return _over(tensor, lambda: tensor.mul_(self._size) if op == "sum" and tensor.numel() <= _FEW else None)

    def reduce(self, tensor: Tensor, root: int, op: str, factor: Factor | None) -> Transfer:
        return _over()

    def all_gather(self, outs: Sequence[Tensor], tensor: Tensor) -> Transfer:
        return _over(tensor, lambda: [out.copy_(tensor) for out in outs])

    def all_gather_into(self, out: Tensor, tensor: Tensor) -> Transfer:
        return _over(tensor, lambda: out.view(self._size, -1).copy_(tensor.reshape(1, -1)))

    def gather(self, outs: Sequence[Tensor], tensor: Tensor, root: int) -> Transfer:
        return self.all_gather(outs, tensor)

    def gather_into(self, out: Tensor | None, tensor: Tensor, root: int) -> Transfer:
        return _over() if out is None else self.all_gather_into(out, tensor)

    def scatter(self, out: Tensor, chunks: Sequence[Tensor] | Tensor | None, root: int) -> Transfer:
        return _over(out, lambda: _arrive(out) if chunks is None else out.copy_(chunks[self._rank]))

    def reduce_scatter(
        self, out: Tensor, tensor: Tensor, sizes: Sequence[int], op: str, factor: Factor | None
    ) -> Transfer:
        return _over(tensor, lambda: out.copy_(tensor.split(list(sizes))[self._rank]))

    def all_to_all(
        self, out: Tensor, tensor: Tensor, recv_sizes: Sequence[int], send_sizes: Sequence[int], even: bool
    ) -> Transfer:
        def receive() -> None:
            own = tensor.split(list(send_sizes))[self._rank]
            for part in out.split(list(recv_sizes)):
                if part.shape == own.shape:
                    part.copy_(own)
                else:
                    _arrive(part)

        return _over(tensor, receive)

    def barrier(self) -> Transfer:
        return _over()

    def send(self, tensor: Tensor, to: int, tag: int) -> Transfer:
        return _over()

    def recv(self, tensor: Tensor, source: int | None, tag: int) -> Transfer:
        transfer = _over(tensor, lambda: _arrive(tensor))
        transfer.finish = lambda: (self._rank + 1) % self._size if source is None else source
        return transfer

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Transfer:
        def receive() -> None:
            for tensor, _ in recvs:
                _arrive(tensor)

        return _over(None, receive)


def _over(tensor: Tensor | None = None, receive: Callable[[], object] = lambda: None) -> Transfer:
    """A transfer that is over as soon as it starts; `receive` writes what arrives, but not for a meta `tensor`."""

    @torch.no_grad()
    def run() -> None:
        if tensor is None or not tensor.is_meta:
            receive()

    def start() -> list[dist.Work]:
        run()
        return []

    return Transfer(start, run=run)


def _arrive(tensor: Tensor) -> None:
    """Random numbers of the size of activations; zeros where the dtype has no fractions."""
    if tensor.is_meta:
        return
    if not tensor.is_floating_point():
        tensor.zero_()
        return
    pattern = _pattern(tensor.device, tensor.dtype)
    flat = tensor.view(-1)
    times, rest = divmod(len(flat), _PATTERN)
    flat[: times * _PATTERN].view(times, _PATTERN).copy_(pattern)
    flat[len(flat) - rest :].copy_(pattern[:rest])


@cache
def _pattern(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(_PATTERN, generator=torch.Generator().manual_seed(0)).to(device, dtype)
