"""The three ways to meet: environment variables, a TCP address, a shared file.

Document 001, "初始化方法", "完成初始化后" and "Shutdown".

unisono run -n 4 examples/seeds/001_torch/initialise.py

A launcher sets the variables, so `uni.init()` needs no words. Processes that were started by hand name an address or
a file, and their rank. Printed by each rank: how it met the others, and what they sum up to.
"""

from __future__ import annotations

import os
import socket
import tempfile

import torch
import torch.distributed as dist

import unisono as uni


def meet(how: str, url: str, rank: int, size: int) -> None:
    comm = uni.init("gloo", init_method=url, rank=rank, world_size=size)
    assert dist.is_initialized()
    assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
    total = comm.all_reduce(torch.tensor([comm.rank]))
    print(f"{how}: rank {comm.rank} of {comm.size} over {comm.backend}, ranks sum to {total.item()}")
    assert total.item() == size * (size - 1) // 2
    uni.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    comm = uni.init()
    rank, size = comm.rank, comm.size
    port, folder = comm.broadcast_object((free_port(), tempfile.mkdtemp()) if rank == 0 else None)
    uni.shutdown()

    meet("environment", "env://", rank, size)
    meet("tcp", f"tcp://127.0.0.1:{port}", rank, size)
    meet("file", f"file://{os.path.join(folder, 'meeting')}", rank, size)


if __name__ == "__main__":
    main()
