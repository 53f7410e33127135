"""Who am I: rank, size, rank on this host, and the host's name.

Document 000, vqnetrun's flags n, H, hostfile, output-filename, verbose, start-timeout. One program for all of them:

vqnetrun -n 2 python examples/seeds/000_vqnet/launch.py
vqnetrun -np 2 -H localhost:2 --verbose --start-timeout 30 python examples/seeds/000_vqnet/launch.py

With `node0 slots=1` and `node2 slots=1` in a file hosts: -np 2 -f hosts, or -hostfile, or --hostfile; the same is
-H node0:1,node2:1. --output-filename out writes each rank's lines to out/rank.N as well; -h lists all flags.
"""

from __future__ import annotations

from unisono.compat.vqnet.distributed import CommController, get_host_name

Comm_OP = CommController("mpi")

rank = Comm_OP.getRank()
size = Comm_OP.getSize()
print(f"rank: {rank}, size {size}")
print(f"LocalRank {Comm_OP.getLocalRank()} hosts name {get_host_name()}")

assert 0 <= Comm_OP.getLocalRank() <= rank < size
