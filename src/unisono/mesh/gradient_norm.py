"""The norm of tensors of which ranks hold shards, and scaling gradients by it, as torch clips them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from unisono.comm.communicator import Communicator
from unisono.torch_compat import foreach_mul_, foreach_norm


def norm_of_shards(shards: Iterable[torch.Tensor], comm: Communicator, norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all elements, in float64. Every rank of `comm` calls it, and each shard is given by one of them."""
    stacks = [torch.stack(foreach_norm(each, norm_type)).double() for each in by_kind(s for s in shards if s.numel())]
    device = stacks[0].device if stacks else comm.device
    stacked = torch.cat([norms.to(device) for norms in stacks]) if stacks else torch.zeros(1, device=device).double()
    if math.isinf(norm_type):
        total = stacked.max()
        return comm.all_reduce(total.to(comm.device), "max") if comm.size > 1 else total
    total = stacked.pow(norm_type).sum()
    if comm.size > 1:
        total = comm.all_reduce(total.to(comm.device))  # gradients may be in host memory, and comm may be NCCL
    return total.pow(1.0 / norm_type)


def scale_to_norm(gradients: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients, whose norm is `norm`, so that it is at most max_norm, in place."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for alike in by_kind(gradients):
        foreach_mul_(alike, factor.to(alike[0].device, alike[0].dtype))


def by_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Those of one device and dtype together: one call serves them all, where each of its own would cost a launch."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())
