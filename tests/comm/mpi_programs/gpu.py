"""Tensors on a GPU (the ranks may share one), through c10d and the short way."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.comm.expectation import DTYPES, OPS, has_meaning, reduced, sample
from tests.comm.mpi_programs import harness
from tests.comm.mpi_programs.collectives import c10d_all_reduce, c10d_op, equal, factor
from unisono.comm.mpi import buffers, calls

warnings.filterwarnings("ignore", category=FutureWarning)

SHAPE = (4, 6)


def on_gpu(dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Everybody's tensor on the host, and mine on the GPU."""
    everybodys = [sample(rank, SHAPE, dtype) for rank in range(dist.get_world_size())]
    return everybodys, everybodys[dist.get_rank()].cuda()


def check_reductions() -> None:
    for dtype in DTYPES:
        for op in OPS:
            if not has_meaning(op, dtype):
                continue
            everybodys, mine = on_gpu(dtype)
            c10d_all_reduce(mine, op)
            equal(mine.cpu(), reduced(op, everybodys), (op, dtype))
            _, mine = on_gpu(dtype)
            dist.group.WORLD.run([calls.all_reduce(mine, op, factor(op), dist.get_world_size())])
            equal(mine.cpu(), reduced(op, everybodys), (op, dtype, "now"))
            check_reductions_to_some(op, everybodys)


def check_reductions_to_some(op: str = "sum", everybodys: list[torch.Tensor] | None = None) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    everybodys = everybodys or on_gpu(torch.float32)[0]
    mine, expected = everybodys[rank].cuda(), reduced(op, everybodys)
    dist.group.WORLD.run([calls.reduce(mine, size - 1, op, factor(op), rank, size)])
    equal(mine.cpu(), expected if rank == size - 1 else everybodys[rank], ("reduce", op, mine.dtype))
    mine, out = everybodys[rank].cuda(), torch.empty_like(expected.chunk(size)[0], device="cuda")
    dist.reduce_scatter_tensor(out, mine, c10d_op(op))
    equal(out.cpu(), expected.chunk(size)[rank], ("reduce_scatter", op, mine.dtype))
    counts = [1, *[0] * (size - 2), len(expected) - 1]
    out = torch.empty(counts[rank], *SHAPE[1:], dtype=mine.dtype, device="cuda")
    dist.group.WORLD.run([calls.reduce_scatter(out, mine.split(counts), op, factor(op), rank, size)])
    equal(out.cpu(), expected.split(counts)[rank], ("uneven reduce_scatter", op, mine.dtype))


def check_who_has_the_memory() -> None:
    """An MPI that takes GPU memory is given it as it lies; any other gets the host's."""
    tensor, view = torch.ones(SHAPE, device="cuda"), torch.ones(SHAPE, device="cuda").t()
    aware = buffers.cuda_aware()
    assert (buffers.readable(tensor) is tensor) == (buffers.writable(tensor) is tensor) == aware
    assert buffers.readable(view).is_cuda == buffers.writable(view).is_cuda == aware
    assert buffers.folds(tensor, 2) == aware
    assert not buffers.computable(view).is_cuda, "MPI computes on the host"


def check_long_and_late() -> None:
    """Memory that kernels in the queue are still working on, long enough to be seen."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn in range(3):
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
        mine = torch.full((size, 2**21), float(turn * size + rank), device="cuda") + 0 * busy[0, 0]
        wanted = torch.arange(turn * size, turn * size + size, device="cuda", dtype=torch.float32)
        total = mine.clone()
        dist.all_reduce(total)
        assert (total == wanted.sum()).all().item()
        scratch = (mine * 2).sum() + busy.sum()  # its memory is free before it has been used
        parts = [torch.empty_like(mine[0]) for _ in range(size)]
        dist.all_gather(parts, mine[0])
        assert all((part == value).all().item() for part, value in zip(parts, wanted, strict=True)), scratch
        dist.all_to_all_single(mine, mine)
        assert (mine == wanted[:, None]).all().item()


def check_sub_groups() -> None:
    rank = dist.get_rank()
    alone = [dist.new_group([one]) for one in range(dist.get_world_size())][rank]
    swapped = dist.new_group(list(range(dist.get_world_size()))[::-1])
    tensor = torch.full((2**18,), rank + 1.0, device="cuda")
    dist.all_reduce(tensor, group=alone)
    assert (tensor == rank + 1).all().item()
    dist.broadcast(tensor, 0, group=swapped)
    assert (tensor == 1).all().item()
    dist.all_reduce(tensor, group=swapped)
    assert (tensor == dist.get_world_size()).all().item()


def check_gather_and_scatter() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((3, 2**17), float(rank), device="cuda")
    outs = [torch.empty_like(mine) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, outs, dst=0)
    assert all((out == r).all().item() for r, out in enumerate(outs or ()))
    back = torch.empty_like(mine)
    dist.scatter(back, outs, src=0)
    assert (back == rank).all().item()


def check_moves() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        everybodys, mine = on_gpu(dtype)
        out = torch.empty(size, *SHAPE, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(out, mine)
        equal(out.cpu(), torch.stack(everybodys), ("all_gather_into_tensor", dtype))
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine)
        equal(torch.stack(parts).cpu(), torch.stack(everybodys), ("all_gather", dtype))
        swapped = torch.empty_like(mine)
        dist.all_to_all_single(swapped, mine)
        equal(swapped.cpu(), torch.cat([one.chunk(size)[rank] for one in everybodys]), ("all_to_all", dtype))
        view = torch.zeros(SHAPE[1], SHAPE[0], dtype=dtype, device="cuda").t()
        view.copy_(mine)
        dist.broadcast(view, size - 1)
        equal(view.contiguous().cpu(), everybodys[-1], ("broadcast of a view", dtype))
        got = torch.empty_like(mine)
        works = [dist.isend(mine, (rank + 1) % size), dist.irecv(got, (rank - 1) % size)]
        for work in works:
            work.wait()
        equal(got.cpu(), everybodys[(rank - 1) % size], ("send and receive", dtype))


def check_after_work_on_a_side_stream() -> None:
    size = dist.get_world_size()
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor = torch.ones(2**20, device="cuda")
        for _ in range(50):
            tensor = tensor * 1.0
        dist.all_reduce(tensor)
        assert (tensor == size).all().item()


def check_future_of_gpu_tensors() -> None:
    tensor = torch.full((5,), 3.0, device="cuda")
    [value] = dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True).get_future().wait()
    assert value.tolist() == [3.0] * 5


def check_distributed_data_parallel() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    alone = nn.Linear(6, 3).double().cuda()
    wrapped = DistributedDataParallel(nn.Linear(6, 3).double().cuda())
    wrapped.module.load_state_dict(alone.state_dict())
    inputs = torch.randn(4 * size, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).cuda()
    alone(inputs).square().mean().backward()
    wrapped(inputs.chunk(size)[rank]).square().mean().backward()
    torch.testing.assert_close(wrapped.module.weight.grad, alone.weight.grad, rtol=1e-11, atol=1e-13)


if __name__ == "__main__":
    harness.main(globals())
