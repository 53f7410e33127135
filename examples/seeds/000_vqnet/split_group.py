"""Four ranks in two groups.

Document 000, CommController.split_group. An element is a pair: the group's communicator, which only its members have,
and its ranks.

vqnetrun -n 4 python examples/seeds/000_vqnet/split_group.py
"""

from __future__ import annotations

from unisono.compat.vqnet.distributed import CommController

Comm_OP = CommController("mpi")

groups = Comm_OP.split_group([[0, 1], [2, 3]])
print(groups)

for comm, ranks in groups:
    assert (comm is not None) == (Comm_OP.getRank() in ranks)
    if comm is not None:
        assert (comm.size, comm.rank) == (2, ranks.index(Comm_OP.getRank()))
