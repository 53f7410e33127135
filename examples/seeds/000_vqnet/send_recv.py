"""A tensor from rank 0 to rank 1.

Document 000, CommController.send and recv.

vqnetrun -n 2 python examples/seeds/000_vqnet/send_recv.py
"""

from __future__ import annotations

import numpy as np

from unisono.compat.vqnet.distributed import CommController, get_rank
from unisono.compat.vqnet.tensor import tensor

Comm_OP = CommController("mpi")


def drawn(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).random((1, 5))


num = tensor.to_tensor(drawn(get_rank()))
recv = tensor.zeros_like(num)

if get_rank() == 0:
    Comm_OP.send(num, 1)
elif get_rank() == 1:
    Comm_OP.recv(recv, 0)
print(f"rank {Comm_OP.getRank()}  {num}")
print(f"rank {Comm_OP.getRank()}  {recv}")

np.testing.assert_array_equal(recv.to_numpy(), drawn(0) if get_rank() == 1 else np.zeros((1, 5)))
