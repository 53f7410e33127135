"""More than 2**31 elements in one call. Needs about 4 GiB a rank."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from tests.comm.mpi_programs import harness

warnings.filterwarnings("ignore", category=FutureWarning)

COUNT = 2**31 + 8
MEMORY = torch.empty(COUNT, dtype=torch.uint8)  # of all checks: pages cost more than what is done with them


def check_broadcast() -> None:
    rank = dist.get_rank()
    tensor = MEMORY.fill_(rank)
    if rank == 1:
        tensor[-3:] = 77
    dist.broadcast(tensor, 1)
    assert tensor[0].item() == 1
    assert tensor[2**31 - 2 :].tolist() == [1] * 7 + [77] * 3


def check_all_reduce() -> None:
    tensor = MEMORY.fill_(1)
    dist.all_reduce(tensor)
    assert tensor[:2].tolist() == tensor[-2:].tolist() == [2, 2]


def check_point_to_point() -> None:
    tensor = MEMORY.fill_(5 * dist.get_rank())
    if dist.get_rank() == 1:
        dist.send(tensor, 0)
    else:
        dist.recv(tensor, 1)
    assert tensor[:2].tolist() == tensor[-2:].tolist() == [5, 5]


def check_all_gather() -> None:
    part = torch.full((2**30 + 4,), dist.get_rank() + 1, dtype=torch.uint8)
    full_value = MEMORY.fill_(0)[: 2 * len(part)]
    dist.all_gather_into_tensor(full_value, part)
    assert full_value[:2].tolist() == [1, 1]
    assert full_value[-2:].tolist() == [2, 2]


if __name__ == "__main__":
    harness.main(globals())
