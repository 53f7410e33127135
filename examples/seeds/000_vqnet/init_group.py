"""Sums over the groups {0, 2} and {1} of three ranks.

Document 000, init_group.

vqnetrun -n 3 python examples/seeds/000_vqnet/init_group.py
"""

from __future__ import annotations

from unisono.compat.vqnet.distributed import CommController, init_group, np, tensor

Comm_OP = CommController("mpi")


def drawn(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).random((1, 5))


num = tensor.to_tensor(drawn(Comm_OP.getRank()))
print(f"rank {Comm_OP.getRank()}  {num}")

group_l = init_group([[0, 2], [1]])

for comm_ in group_l:
    if Comm_OP.getRank() in comm_[1]:
        Comm_OP.allreduce_group(num, "sum", group=comm_[0])
        print(f"rank {Comm_OP.getRank()}  {num} after")
        np.testing.assert_allclose(num.to_numpy(), sum(drawn(rank) for rank in comm_[1]), rtol=1e-15)
