"""One number from rank 0 to rank 1, while both go on with something else.

Document 001, "点对点通信", non-blocking.

unisono run -n 2 examples/seeds/001_torch/nonblocking.py

Between isend or irecv and wait() the tensor belongs to the message: it is neither written nor read. Printed: who
started what, and that both ranks have 1.
"""

from __future__ import annotations

import torch

import unisono as uni


def main() -> None:
    comm = uni.init()
    tensor = torch.zeros(1)
    if comm.rank == 0:
        tensor += 1
        handle = comm.isend(tensor, to=1)
        print("rank 0 started sending")
    else:
        handle = comm.irecv(tensor, source=0)
        print("rank 1 started receiving")
    meanwhile = sum(range(1000))
    handle.wait()
    assert handle.is_completed()
    print(f"rank {comm.rank} has {tensor.item():g}, and {meanwhile} in the meantime")
    assert tensor.item() == 1
    uni.shutdown()


if __name__ == "__main__":
    main()
