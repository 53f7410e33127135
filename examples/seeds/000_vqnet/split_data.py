"""Samples and labels, sharded over the ranks.

Document 000, split_data. Here the parts of all ranks are put together again, to see that none is missing.

vqnetrun -n 2 python examples/seeds/000_vqnet/split_data.py
"""

from __future__ import annotations

import numpy as np

from unisono.compat.vqnet.distributed import CommController, split_data
from unisono.compat.vqnet.tensor import tensor

draw = np.random.default_rng(0)
x_all = draw.integers(255, size=(100, 5))
y_all = draw.integers(2, size=(100, 1))

x_train, y_train = split_data(x_all, y_all)

Comm_OP = CommController("mpi")
print(f"rank {Comm_OP.getRank()} has {len(x_train)} of {len(x_all)} samples")

assert len(x_train) == len(y_train) == len(x_all) // Comm_OP.getSize()
np.testing.assert_array_equal(Comm_OP.allgather(tensor.to_tensor(x_train)).to_numpy(), x_all)
np.testing.assert_array_equal(Comm_OP.allgather(tensor.to_tensor(y_train)).to_numpy(), y_all)
