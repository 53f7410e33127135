"""Tensors on a GPU (the ranks may share one), through c10d and the short way."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.comm.expectation import DTYPES, OPS, has_meaning, reduced, sample
from tests.comm.mpi_programs import harness
from tests.comm.mpi_programs.collectives import c10d_all_reduce, equal, factor

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
            dist.group.WORLD.all_reduce_now(mine, op, factor(op))
            equal(mine.cpu(), reduced(op, everybodys), (op, dtype, "now"))


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
