"""A dataset in parts, one a rank.

Document 001, "分布式训练", Partition and DataPartitioner.

unisono run -n 4 examples/seeds/001_torch/partition.py

The document's version rounds each part down and so loses up to a sample a part; uni.DataPartitioner, from the same
seed and shuffle, loses none. Printed by each rank: how many samples it has, and its first three.
"""

from __future__ import annotations

from sklearn.datasets import load_digits

import unisono as uni


def main() -> None:
    comm = uni.init()
    digits = list(range(len(load_digits().target)))
    part = uni.DataPartitioner(digits, [1 / comm.size] * comm.size, seed=1234).use(comm.rank)
    print(f"rank {comm.rank} has {len(part)} of {len(digits)} samples: {part[0]}, {part[1]}, {part[2]} ...")

    parts = comm.all_gather_object([part[position] for position in range(len(part))])
    assert sorted(sample for each in parts for sample in each) == digits
    uni.shutdown()


if __name__ == "__main__":
    main()
