"""One number from rank 0 to rank 1; both wait until it is there.

Document 001, "点对点通信", blocking.

unisono run -n 2 examples/seeds/001_torch/blocking.py

Printed: both ranks have 1.
"""

from __future__ import annotations

import torch

import unisono as uni


def main() -> None:
    comm = uni.init()
    tensor = torch.zeros(1)
    if comm.rank == 0:
        tensor += 1
        comm.send(tensor, to=1)
    else:
        comm.recv(tensor, source=0)
    print(f"rank {comm.rank} has {tensor.item():g}")
    assert tensor.item() == 1
    uni.shutdown()


if __name__ == "__main__":
    main()
