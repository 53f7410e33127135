"""One rank gets the average of all; the others keep what they have.

Document 000, CommController.reduce.

vqnetrun -n 2 python examples/seeds/000_vqnet/reduce.py
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

Comm_OP.reduce(num, 1)
print(f"rank {Comm_OP.getRank()}  {num}")

average = sum(drawn(rank) for rank in range(Comm_OP.getSize())) / Comm_OP.getSize()
np.testing.assert_allclose(num.to_numpy(), average if Comm_OP.getRank() == 1 else drawn(Comm_OP.getRank()), rtol=1e-15)
