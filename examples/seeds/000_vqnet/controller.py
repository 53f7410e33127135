"""The controller's own methods, and the functions that need none.

Document 000, CommController: getRank, getSize, getLocalRank, barrier, get_device_num; get_rank, get_local_rank.

vqnetrun -n 2 python examples/seeds/000_vqnet/controller.py
"""

from __future__ import annotations

import torch

from unisono.compat.vqnet.distributed import CommController
from unisono.compat.vqnet.distributed.ControlComm import get_local_rank, get_rank

before = get_rank(), get_local_rank()  # known before anything is joined

Comm_OP = CommController("nccl")
assert (Comm_OP.getRank(), Comm_OP.getLocalRank()) == before == (get_rank(), get_local_rank())
assert Comm_OP.getSize() == 2
assert Comm_OP.get_device_num() == torch.cuda.device_count()
Comm_OP.barrier()
print(f"{Comm_OP}: {Comm_OP.get_device_num()} GPUs on this host")
