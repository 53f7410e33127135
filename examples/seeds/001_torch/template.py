"""The template: a function on two ranks that this script starts itself.

Document 001, "分布式设置模板" and "Spawn utility".

python examples/seeds/001_torch/template.py

uni.spawn forks the ranks, gives each its seat, and brings back what they return, so that neither an address nor a
port nor a loop over processes is left in the script. Printed: each rank's greeting, then the results by rank.
"""

from __future__ import annotations

import unisono as uni


def run(greeting: str) -> tuple[int, int]:
    comm = uni.init("gloo")
    print(f"{greeting} from rank {comm.rank} of {comm.size}")
    uni.shutdown()
    return comm.rank, comm.size


if __name__ == "__main__":
    seats = uni.spawn(run, 2, args=("hello",))
    assert seats == [(0, 2), (1, 2)]
    print(f"seats: {seats}")
