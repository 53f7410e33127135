"""A collective under way while the rank computes.

Document 001, "同步和异步集合运算".

unisono run -n 2 examples/seeds/001_torch/asynchronous.py

On a GPU, wait() means that the sum stands in the queue before whatever the current stream is given next; another
stream must be told to wait for that one, as here. On a CPU wait() means that it is done. Printed: 101 for both ranks.
"""

from __future__ import annotations

import contextlib

import torch

import unisono as uni


def main() -> None:
    comm = uni.init()
    output = torch.tensor([comm.rank], device=comm.device)
    handle = comm.all_reduce(output, async_op=True)
    handle.wait()
    assert handle.is_completed()
    with contextlib.ExitStack() as stack:
        if output.is_cuda:
            side = torch.cuda.Stream()
            stack.enter_context(torch.cuda.stream(side))
            side.wait_stream(torch.cuda.default_stream())
        output.add_(100)
    print(f"rank {comm.rank}: {output.item()}")
    assert output.item() == 100 + comm.size * (comm.size - 1) // 2

    work = comm.all_reduce(torch.ones(1), async_op=True)
    assert work.get_future().wait().item() == comm.size
    uni.shutdown()


if __name__ == "__main__":
    main()
