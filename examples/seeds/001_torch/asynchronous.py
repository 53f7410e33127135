"""A collective under way while the rank computes.

Document 001, "同步和异步集合运算".

unisono run -n 2 examples/seeds/001_torch/asynchronous.py

On a GPU, wait() means that the sum stands in the queue before whatever the current stream is given next; another
stream must be told to wait for that one. On a CPU wait() means that it is done. Printed: 101 for both ranks.
"""

from __future__ import annotations

import torch

import unisono as uni


def add_hundred(output: torch.Tensor) -> None:
    """On a GPU in a stream of its own: that stream waits for the sum, and whoever reads the result waits for it."""
    if not output.is_cuda:
        output.add_(100)
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        output.add_(100)
    torch.cuda.current_stream().wait_stream(side)


def main() -> None:
    comm = uni.init()
    output = torch.tensor([comm.rank], device=comm.device)
    handle = comm.all_reduce(output, async_op=True)
    handle.wait()
    assert handle.is_completed()
    add_hundred(output)
    print(f"rank {comm.rank}: {output.item()}")
    assert output.item() == 100 + comm.size * (comm.size - 1) // 2

    work = comm.all_reduce(torch.ones(1), async_op=True)
    assert work.get_future().wait().item() == comm.size
    uni.shutdown()


if __name__ == "__main__":
    main()
