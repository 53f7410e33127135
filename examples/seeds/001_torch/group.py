"""A sum over some of the ranks.

Document 001, "进程组间通信", the all-reduce example.

unisono run -n 4 examples/seeds/001_torch/group.py

Only its members make a subgroup; `split` gives every rank the group that it is in. Ranks of a group count from 0.
Printed: ranks 0 and 1 have 2, the others still 1; then each half of the world has the sum of its world ranks.
"""

from __future__ import annotations

import torch

import unisono as uni


def main() -> None:
    comm = uni.init()
    tensor = torch.ones(1)
    if comm.rank in (0, 1):
        comm.subgroup([0, 1]).all_reduce(tensor, op="sum")
    print(f"rank {comm.rank} has {tensor.item():g}")
    assert tensor.item() == (2 if comm.rank < 2 else 1)

    half = comm.split([[0, 1], [2, 3]])
    assert half is not None
    total = half.all_reduce(torch.tensor([comm.rank]))
    print(f"rank {comm.rank} is rank {half.rank} of {half.ranks}, which sum to {total.item()}")
    assert total.item() == sum(half.ranks)
    uni.shutdown()


if __name__ == "__main__":
    main()
