"""A training script that a launcher starts, with torch's own DistributedDataParallel in it.

Document 001, "Launch utility".

unisono run -n 4 examples/seeds/001_torch/launch.py

The script takes no --local-rank: the communicator knows it. The same file runs under torchrun, mpiexec and srun, and
with -H node0:2,node1:2 on two hosts. Printed by each rank: its seat, and how far its gradient is from that of one
process that sees all samples.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono as uni


def main() -> None:
    comm = uni.init()
    torch.manual_seed(0)
    plain = nn.Linear(8, 1).to(comm.device)
    samples = torch.randn(4 * comm.size, 8, device=comm.device)

    model = DistributedDataParallel(plain)  # torch's default group is unisono's world
    model(samples.chunk(comm.size)[comm.rank]).square().mean().backward()
    assert plain.weight.grad is not None

    (full,) = torch.autograd.grad(plain(samples).square().mean(), plain.weight)
    deviation = (plain.weight.grad - full).abs().max().item()
    print(f"rank {comm.rank}/{comm.size}, local rank {comm.local_rank} on {comm.host}: deviation {deviation:.1e}")
    assert deviation < 1e-6
    uni.shutdown()


if __name__ == "__main__":
    main()
