"""What every program here does: join the world, run the checks, say which passed.

A check is a function named check_...; it raises where something is wrong, and that ends the job on all ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.mpi import library


def join(timeout: timedelta = timedelta(seconds=60)) -> None:
    torch.set_num_threads(1)
    library.register()
    rank, size = library.world()
    store = dist.FileStore(os.environ["TEST_STORE"], size)
    dist.init_process_group(library.BACKEND, store=store, rank=rank, world_size=size, timeout=timeout)


def checks_of(namespace: dict[str, Any]) -> dict[str, Callable[[], None]]:
    return {name: value for name, value in namespace.items() if name.startswith("check_")}


def main(namespace: dict[str, Any]) -> None:
    """Run the named checks (all, when the command line names none)."""
    join()
    checks = checks_of(namespace)
    for name in sys.argv[1:] or checks:
        checks[name]()
        dist.barrier()
        if dist.get_rank() == 0:
            print("PASSED", name, flush=True)
    dist.destroy_process_group()
