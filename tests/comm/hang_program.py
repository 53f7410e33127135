"""A job of which one rank does something else than the others."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.utils.data

import unisono as uni


class Samples(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        parent = os.getppid()
        while index == 3 and os.getppid() == parent:  # and no longer: nobody ends what the rank leaves
            time.sleep(0.1)
        return index


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("bad sample 17")  # LINE: backward


def fail(*given: Any) -> None:
    raise ValueError("bad sample 17")  # LINE: hook


def main(scenario: str, timeout: float, odd: int, rank_info: Mapping[str, str] | None = None) -> None:
    """`rank_info`: as launchers tell it, in variables. Ranks then have time to come, however short the timeout."""
    os.environ.update(rank_info or {})
    comm = uni.init(timeout=timeout)
    x = torch.ones(1024)
    comm.all_reduce(x)
    if scenario == "busy":
        in_torch_all_the_time(comm.rank, 1.5 * timeout)
        return
    if scenario in ("crossed", "group", "opposite"):
        in_groups(comm, scenario, odd)
        return
    if scenario in ("brief", "brief shutdown"):
        comm.all_reduce(torch.ones(1500) if comm.rank == odd else x)
        if scenario == "brief shutdown":
            uni.shutdown()
        return
    if scenario == "left early":
        without_one(comm, odd)
        return
    if scenario == "split":
        comm.split([[0, 1], [2, 3]] if comm.rank != odd else [[0, 1, 2], [3]])  # LINE: split
        comm.barrier()
    if scenario.startswith("late") and comm.rank < 2:
        time.sleep(0.5)  # the other two differ, or one of them leaves, meanwhile
    if scenario == "future" and comm.rank != odd:
        torch.distributed.all_reduce(x, async_op=True).get_future().wait()  # LINE: future
    if scenario == "long message" and comm.rank == 0:
        comm.send(torch.ones(2048), odd)
    if comm.rank != odd:
        comm.all_reduce(x)  # LINE: all
        comm.barrier()
    elif scenario == "op":
        comm.broadcast(x)  # LINE: op
        comm.barrier()
    elif scenario == "shape":
        comm.all_reduce(torch.ones(512))  # LINE: shape
        comm.barrier()
    elif scenario == "dtype":
        comm.all_reduce(x.to(torch.int32))  # LINE: dtype
        comm.barrier()
    elif scenario == "longer":
        comm.all_reduce(torch.ones(1500))  # LINE: longer
        comm.barrier()
    elif scenario in ("order", "late order"):
        comm.barrier()  # LINE: order
        comm.all_reduce(x)
    elif scenario in ("exit", "late exit", "future"):
        return
    elif scenario == "shutdown":
        uni.shutdown()
        return
    elif scenario == "sleep":
        time.sleep(1000)  # LINE: sleep
    elif scenario == "loop":
        while True:  # LINE: loop
            pass  # LINE: loop body
    elif scenario == "loader":
        list(torch.utils.data.DataLoader(Samples(), num_workers=1))  # LINE: loader
    elif scenario == "backward":
        Fails.apply(torch.ones(2, requires_grad=True)).sum().backward()
    elif scenario == "hook":
        layer = torch.nn.Linear(2, 2)
        layer.register_full_backward_hook(fail)
        layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    elif scenario == "raise":
        raise ValueError("bad sample 17")  # LINE: raise
    elif scenario == "torch":
        torch.distributed.broadcast(x, 0)  # LINE: torch
        torch.distributed.broadcast(x, odd - 1)
    elif scenario == "torch shape":
        torch.distributed.all_reduce(torch.ones(512))  # LINE: torch shape
    elif scenario in ("receive", "long message"):
        comm.recv(x, 0)  # LINE: receive
    time.sleep(1000)


def without_one(comm: uni.Communicator, odd: int) -> None:
    """One rank has nothing more to do; the others go on without it, and wait for each other for longer than it takes to
    give up one who waits for a rank that has gone."""
    rest = [rank for rank in range(comm.size) if rank != odd]
    group = comm.subgroup(rest) if comm.rank != odd else None
    if group is None:
        return
    x = torch.ones(4)
    if group.rank == 0:
        time.sleep(2.5)
    group.all_reduce(x)
    if group.rank == 0:
        time.sleep(2)
        group.send(x, 1)
    elif group.rank == 1:
        group.recv(x, 0)
        time.sleep(2)
    group.gather(x, root=0)  # the last rank is done with it, and leaves, long before the first
    print("gone on and well", flush=True)


def in_groups(comm: uni.Communicator, scenario: str, odd: int) -> None:
    """Asynchronous calls on two groups of the same ranks: crossed, which is allowed, or different, which is not.
    Opposite: in calls that block."""
    one, other = comm.subgroup(range(4)), comm.subgroup(range(4))
    x, y = torch.ones(1024), torch.ones(8)
    if scenario == "crossed":
        first, second = ((other, y), (one, x)) if comm.rank == odd else ((one, x), (other, y))
        for _ in range(3):
            handles = [group.all_reduce(tensor, async_op=True) for group, tensor in (first, second)]
            for handle in handles:
                handle.wait()
        assert x.tolist() == [64.0] * 1024
        assert y.tolist() == [64.0] * 8
        print("crossed and well", flush=True)
        uni.shutdown()
        return
    if scenario == "opposite":
        if comm.rank == odd:
            other.all_reduce(y)  # LINE: opposite odd
        one.all_reduce(x)  # LINE: opposite
        other.all_reduce(y)
        return
    handle = other.all_reduce(x, async_op=True) if comm.rank != odd else None  # LINE: group
    if handle is None:
        other.all_reduce(torch.ones(512), async_op=True)  # LINE: group odd
    one.barrier()


def in_torch_all_the_time(rank: int, seconds: float) -> None:
    """Nothing but torch's own calls, longer than the watch would wait for one of them."""
    end = time.monotonic() + seconds
    over = torch.zeros(1 << 20)
    while not over[0]:
        over[0] = rank == 0 and time.monotonic() > end
        torch.distributed.all_reduce(over)
    print("busy and well", flush=True)
    uni.shutdown()
