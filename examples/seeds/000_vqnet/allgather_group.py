"""All rows of a group, by a group of init_group and by one of split_group.

Document 000, CommController.allgather_group, which its programs call all_gather_group. Both programs in one file.

vqnetrun -n 2 python examples/seeds/000_vqnet/allgather_group.py
"""

from __future__ import annotations

import numpy as np

from unisono.compat.vqnet.distributed import CommController, get_local_rank, get_rank, init_group
from unisono.compat.vqnet.tensor import tensor

expected = np.array([[3 + 1j], [2], [1], [3 + 1j], [2], [2]], dtype=np.complex64)

Comm_OP = CommController("mpi")
group = init_group([[0, 1]])
complex_data = tensor.QTensor([3 + 1j, 2, 1 + get_rank()], dtype=8).reshape((3, 1))
print(f" before rank {get_rank()}: {complex_data}")
for comm_ in group:
    if Comm_OP.getRank() in comm_[1]:
        complex_data = Comm_OP.all_gather_group(complex_data, comm_[0])
        print(f"after rank {get_rank()}: {complex_data}")
np.testing.assert_array_equal(complex_data.to_numpy(), expected)

Comm_OP = CommController("nccl")
groups = Comm_OP.split_group([[0, 1]])
complex_data = tensor.QTensor([3 + 1j, 2, 1 + get_rank()], dtype=8).reshape((3, 1)).toGPU(1000 + get_local_rank())
complex_data = Comm_OP.allgather_group(complex_data, group=groups[0])
np.testing.assert_array_equal(complex_data.to_numpy(), expected)
