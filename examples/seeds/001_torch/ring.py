"""Our own ring all-reduce, from messages between neighbours.

Document 001, "我们自己的Ring-Allreduce".

unisono run -n 4 examples/seeds/001_torch/ring.py

First the document's: full tensors go round, so a rank sends size - 1 of them. Then the exercise that it leaves to
the reader, uni.ring_all_reduce (src/unisono/comm/ring.py, thirty lines): chunks go round twice, less than two tensors
in all. Printed: how far each is from comm.all_reduce.
"""

from __future__ import annotations

import torch

import unisono as uni


def ring_of_wholes(comm: uni.Communicator, tensor: torch.Tensor) -> torch.Tensor:
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    outgoing, incoming, total = tensor.clone(), torch.empty_like(tensor), tensor.clone()
    for _ in range(comm.size - 1):
        handle = comm.isend(outgoing, to=right)
        comm.recv(incoming, source=left)
        handle.wait()
        total += incoming
        outgoing, incoming = incoming, outgoing  # what came is passed on
    return total


def main() -> None:
    comm = uni.init()
    for length in (1, 10, 1001):  # also fewer numbers than ranks, and numbers that four does not divide
        mine = torch.randn(length, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank))
        want = comm.all_reduce(mine.clone())
        wholes = (ring_of_wholes(comm, mine) - want).abs().max().item()
        chunks = (uni.ring_all_reduce(comm, mine.clone()) - want).abs().max().item()
        print(f"{length} numbers: whole tensors deviate by {wholes:.1e}, chunks by {chunks:.1e}")
        assert max(wholes, chunks) < 1e-14
    uni.shutdown()


if __name__ == "__main__":
    main()
