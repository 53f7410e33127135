"""The sum of complex numbers over a group.

Document 000, CommController.allreduce_group. Without GPUs toGPU leaves a tensor where it is.

vqnetrun -n 2 python examples/seeds/000_vqnet/allreduce_group.py
"""

from __future__ import annotations

import numpy as np

from unisono.compat.vqnet.distributed import CommController, get_local_rank, get_rank
from unisono.compat.vqnet.tensor import tensor

Comm_OP = CommController("nccl")

groups = Comm_OP.split_group([[0, 1]])

complex_data = tensor.QTensor([3 + 1j, 2, 1 + get_rank()], dtype=8).reshape((3, 1)).toGPU(1000 + get_local_rank())
print(f"allreduce_group before rank {get_rank()}: {complex_data}")

Comm_OP.allreduce_group(complex_data, c_op="sum", group=groups[0])
print(f"allreduce_group after rank {get_rank()}: {complex_data}")

np.testing.assert_array_equal(complex_data.to_numpy(), np.array([[6 + 2j], [4], [3]], dtype=np.complex64))
