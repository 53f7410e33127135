"""What the first rank of a group has, for all of it.

Document 000, CommController.broadcast_group.

vqnetrun -n 2 python examples/seeds/000_vqnet/broadcast_group.py
"""

from __future__ import annotations

import numpy as np

from unisono.compat.vqnet.distributed import CommController, get_local_rank, get_rank
from unisono.compat.vqnet.tensor import tensor

Comm_OP = CommController("nccl")

groups = Comm_OP.split_group([[0, 1]])

complex_data = tensor.QTensor([3 + 1j, 2, 1 + get_rank()], dtype=8).reshape((3, 1)).toGPU(1000 + get_local_rank())
print(f"broadcast_group before rank {get_rank()}: {complex_data}")

Comm_OP.broadcast_group(complex_data, group=groups[0])
Comm_OP.barrier()
print(f"broadcast_group after rank {get_rank()}: {complex_data}")

np.testing.assert_array_equal(complex_data.to_numpy(), np.array([[3 + 1j], [2], [1]], dtype=np.complex64))
