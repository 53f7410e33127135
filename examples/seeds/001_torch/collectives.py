"""Every collective of the document, and every way to reduce.

Document 001, "常用集合通信函数" and "distributed.ReduceOp"; document 004, its first section.

unisono run -n 4 examples/seeds/001_torch/collectives.py

All of them work on gloo and MPI alike, those that the document's table crosses out included (NCCL was tried with one
rank). Rank r starts with r + 1. Printed by each rank: what it has after each collective.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial, reduce

import torch

import unisono as uni


def show(comm: uni.Communicator, name: str, have: object, want: object) -> None:
    print(f"{name}: {have}")
    assert have == want, f"rank {comm.rank}, {name}: {have}, expected {want}"


def main() -> None:
    comm = uni.init()
    rank, size, everyone = comm.rank, comm.size, list(range(1, comm.size + 1))

    def mine() -> torch.Tensor:
        return torch.tensor([rank + 1])

    def row() -> torch.Tensor:
        return torch.tensor([10 * rank + column for column in range(size)])

    show(comm, "broadcast", comm.broadcast(mine(), root=2).tolist(), [3])
    show(comm, "reduce", comm.reduce(mine(), root=0).tolist(), [sum(everyone)] if rank == 0 else [rank + 1])
    show(comm, "all_reduce", comm.all_reduce(mine()).tolist(), [sum(everyone)])
    chunks = [torch.tensor([value**2]) for value in everyone] if rank == 0 else None
    show(comm, "scatter", comm.scatter(mine(), chunks, root=0).tolist(), [(rank + 1) ** 2])
    gathered = comm.gather(mine(), root=1)
    show(comm, "gather", gathered and [each.item() for each in gathered], everyone if rank == 1 else None)
    show(comm, "all_gather", [each.item() for each in comm.all_gather(mine())], everyone)
    columns = [sum(10 * other + column for other in range(size)) for column in range(size)]
    show(comm, "reduce_scatter", comm.reduce_scatter(row()).tolist(), [columns[rank]])
    show(comm, "all_to_all", comm.all_to_all(row()).tolist(), [10 * other + rank for other in range(size)])
    comm.barrier()

    reductions: dict[str, Callable[[list[int]], int]] = {
        "sum": sum,
        "avg": lambda values: sum(values) // len(values),
        "product": math.prod,
        "min": min,
        "max": max,
        "band": partial(reduce, operator.and_),
        "bor": partial(reduce, operator.or_),
        "bxor": partial(reduce, operator.xor),
    }
    for op, of in reductions.items():
        show(comm, op, comm.all_reduce(mine(), op=op).item(), of(everyone))
    halves = comm.all_reduce(mine().float(), op="premul_sum", factor=0.5)
    show(comm, "premul_sum", halves.item(), sum(everyone) / 2)
    uni.shutdown()


if __name__ == "__main__":
    main()
