"""Whether all ranks came to the same: a record is compared on one rank, so the others must hold what it holds.

Not the tensors travel but two sums of each, plain and by position, which rounding alone cannot tell apart.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from unisono.comm.communicator import Communicator
from unisono.verify.float64 import wide
from unisono.verify.record import Record, Tensors
from unisono.verify.verdict import Verdict


def with_agreement(comm: Communicator, planned: Record, verdict: Verdict, tolerance: float) -> Verdict:
    """The verdict of rank 0, with what other ranks hold that is not what rank 0 holds. All ranks call it."""
    worst = list(verdict.worst)
    for place, each in enumerate(worst):
        if each.kind not in ("parameters", "buffers"):
            continue
        deviation, name = _farthest(comm, planned.parameters if each.kind == "parameters" else planned.buffers)
        if deviation > max(each.deviation, tolerance):
            worst[place] = replace(each, deviation=deviation, name=name)
    return replace(verdict, worst=worst, equivalent=verdict.equivalent and worst == verdict.worst)


def _farthest(comm: Communicator, tensors: Tensors) -> tuple[float, str]:
    """The largest deviation of any rank's sums from rank 0's, and of what."""
    if not tensors:
        return 0.0, ""
    mine = torch.stack([_sums(tensor) for tensor in tensors.values()]).to(comm.device)
    everyone = torch.stack(comm.all_gather(mine)).cpu()
    gaps = (everyone - everyone[0]).abs().amax(-1).nan_to_num(nan=torch.inf)  # rank, tensor
    sizes = torch.tensor([max(float(wide(tensor).norm()), 1e-300) for tensor in tensors.values()])
    apart = gaps / sizes
    rank, place = divmod(int(apart.argmax()), len(tensors))
    return float(apart.max()), f"{list(tensors)[place]} (rank {rank} beside rank 0)"


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.view_as_real(wide(tensor)).flatten() if tensor.is_complex() else wide(tensor).flatten()
    return torch.stack([flat.sum(), (flat * torch.arange(len(flat), dtype=torch.float64).cos()).sum()])
