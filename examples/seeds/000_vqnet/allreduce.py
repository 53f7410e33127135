"""Every rank gets the sum of all.

Document 000, CommController.allreduce.

vqnetrun -n 2 python examples/seeds/000_vqnet/allreduce.py
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

Comm_OP.allreduce(num, "sum")
print(f"rank {Comm_OP.getRank()}  {num}")

np.testing.assert_allclose(num.to_numpy(), sum(drawn(rank) for rank in range(Comm_OP.getSize())), rtol=1e-15)
