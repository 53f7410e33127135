"""Sub-groups, and what an asynchronous call promises: wait, is_completed, get_future, errors, memory."""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.comm.mpi_programs import harness
from unisono.comm.mpi.work import PROGRESS
from unisono.errors import CommError


def until(condition) -> None:  # type: ignore[no-untyped-def]
    """Wait for something that must happen by itself; the launch's own time limit is the test's."""
    while not condition():
        time.sleep(0.001)


def check_no_thread_before_it_is_needed() -> None:
    dist.all_reduce(torch.ones(3), async_op=True).wait()
    assert PROGRESS._thread is None


def check_wait_and_is_completed() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((5,), float(rank))
    gate = torch.zeros(1)
    if rank == 0:
        work = dist.irecv(gate, 1)
        assert not work.is_completed()
    dist.barrier()
    if rank == 1:
        dist.send(torch.ones(1), 0)
    if rank == 0:
        until(work.is_completed)
        assert work.wait()
        assert work.is_success()
        assert work.exception() is None
        assert gate.item() == 1.0
        assert work.source_rank() == 1
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait()
    assert work.wait()
    assert tensor.tolist() == [sum(range(size))] * 5
    [result] = work.result()
    assert result.data_ptr() == tensor.data_ptr()


def check_future_completes_without_waiting() -> None:
    size = dist.get_world_size()
    halves = torch.ones(7, dtype=torch.bfloat16)
    seen = threading.Event()
    future = dist.all_reduce(halves, async_op=True).get_future()
    future.then(lambda done: seen.set())
    until(seen.is_set)
    assert halves.tolist() == [float(size)] * 7
    assert future.done()
    [value] = future.value()
    assert value.data_ptr() == halves.data_ptr()


def check_many_futures_in_flight() -> None:
    size = dist.get_world_size()
    tensors = [torch.full((1000 + index,), float(index)) for index in range(50)]
    works = [dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True) for tensor in tensors]
    done = torch.futures.collect_all([work.get_future() for work in works])
    for work in works[::3]:
        work.wait()
    done.wait()
    for index, tensor in enumerate(tensors):
        assert tensor.unique().tolist() == [float(index)], (index, size)


def check_finishing_happens_once() -> None:
    # An average is divided once, whoever of the two threads sees it complete.
    for _ in range(200):
        tensor = torch.full((3,), 8.0)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True)
        future = work.get_future()
        work.wait()
        future.wait()
        assert tensor.tolist() == [8.0] * 3


def check_dropped_work_still_arrives() -> None:
    rank = dist.get_rank()
    if rank == 1:
        dist.recv(torch.zeros(1), 0, tag=1)  # rank 0 has dropped its sends by now
        for index in range(20):
            got = torch.zeros(100_000)
            dist.recv(got, 0)
            assert got.unique().tolist() == [float(index)]
    if rank == 0:
        for index in range(20):
            dist.isend(torch.full((100_000,), float(index)), 1)
        gc.collect()
        garbage = [torch.full((100_000,), -1.0) for _ in range(20)]  # would take freed memory
        dist.send(torch.ones(1), 1, tag=1)
        del garbage


def check_timeout() -> None:
    if dist.get_rank() == 0:
        late = torch.zeros(1)
        work = dist.irecv(late, 1)
        with pytest.raises(CommError, match=r"recv did not finish within 0\.05 s"):
            work.wait(timedelta(milliseconds=50))
        dist.barrier()
        work.wait()
        assert late.item() == 7.0
    else:
        dist.barrier()
        if dist.get_rank() == 1:
            dist.send(torch.full((1,), 7.0), 0)


def check_receive_of_another_size() -> None:
    if dist.get_rank() == 1:
        dist.send(torch.ones(3), 0)
        dist.send(torch.ones(9), 0)
    if dist.get_rank() == 0:
        with pytest.raises(CommError, match=r"expected 5 elements .* rank 1 sent 3"):
            dist.recv(torch.zeros(5), 1)
        work = dist.irecv(torch.zeros(5), 1)
        with pytest.raises(CommError, match="recv was sent more than its tensor holds"):
            work.wait()
        assert isinstance(work.exception(), CommError)
        assert not work.is_success()


def check_failed_future() -> None:
    if dist.get_rank() == 1:
        dist.send(torch.ones(3), 0)
    if dist.get_rank() == 0:
        future = dist.irecv(torch.zeros(5), 1).get_future()
        with pytest.raises(Exception, match="rank 1 sent 3"):
            future.wait()


def check_sync_and_async_ranks_meet() -> None:
    tensor = torch.ones(4)
    if dist.get_rank() == 0:
        dist.all_reduce(tensor)
    else:
        dist.all_reduce(tensor, async_op=True).wait()
    assert tensor.tolist() == [float(dist.get_world_size())] * 4


def check_group_of_its_members_only() -> None:
    if dist.get_rank() in (0, 1):  # the others do not take part in making it
        group = dist.new_group([0, 1], use_local_synchronization=True)
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 2.0
        dist.destroy_process_group(group)


def check_subgroups() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    evens, odds = list(range(0, size, 2)), list(range(1, size, 2))
    groups = [dist.new_group(ranks) for ranks in (evens, odds)]
    mine, ranks = (groups[0], evens) if rank % 2 == 0 else (groups[1], odds)
    assert mine.comm.Get_size() == len(ranks)
    assert mine.rank() == ranks.index(rank) == mine.comm.Get_rank()
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, group=mine)
    assert tensor.tolist() == [float(sum(ranks))] * 3
    reported = torch.full((2,), float(rank))
    dist.broadcast(reported, ranks[-1], group=mine)
    assert reported.tolist() == [float(ranks[-1])] * 2
    pair = [dist.new_group([0, r]) for r in range(1, size)]  # overlapping groups
    for other, group in enumerate(pair, start=1):
        if rank in (0, other):
            both = torch.ones(1)
            dist.all_reduce(both, group=group)
            assert both.item() == 2.0
    dist.destroy_process_group(mine)
    dist.barrier()


def check_group_timeout() -> None:
    group = dist.new_group([0, 1], timeout=timedelta(milliseconds=100))
    if dist.get_rank() == 0:
        lonely = torch.zeros(1)
        work = dist.irecv(lonely, 1, group=group)
        with pytest.raises(CommError, match=r"within 0\.1 s"):
            work.wait()
        dist.barrier()
        work.wait(timedelta(seconds=60))
    else:
        dist.barrier()
        if dist.get_rank() == 1:
            dist.send(torch.zeros(1), 0, group=group)


if __name__ == "__main__":
    harness.main(globals())
