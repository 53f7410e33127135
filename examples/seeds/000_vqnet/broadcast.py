"""Every rank gets what rank 1 has.

Document 000, CommController.broadcast.

vqnetrun -n 2 python examples/seeds/000_vqnet/broadcast.py
"""

from __future__ import annotations

import numpy as np

from unisono.compat.vqnet.distributed import CommController
from unisono.compat.vqnet.tensor import tensor

Comm_OP = CommController("mpi")


def drawn(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).random((1, 5))


num = tensor.to_tensor(drawn(Comm_OP.getRank()))
print(f"rank {Comm_OP.getRank()}  {num}")

Comm_OP.broadcast(num, 1)
print(f"rank {Comm_OP.getRank()}  {num}")

np.testing.assert_array_equal(num.to_numpy(), drawn(1))
