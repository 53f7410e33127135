"""What torch builds on a process group, on MPI: each must give the result of one process, in float64."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.comm.mpi_programs import harness

warnings.filterwarnings("ignore", category=FutureWarning)

WIDTH, BATCH, STEPS = 12, 16, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def blocks() -> int:
    return 2 * dist.get_world_size()  # for pipelines with two stages a rank


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(blocks()))).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return tuple(torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def my_share(full: torch.Tensor) -> torch.Tensor:
    return full.chunk(dist.get_world_size())[dist.get_rank()]


def train(module: nn.Module, share: Callable[[torch.Tensor], torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(module(share(inputs)), share(targets)).backward()
        optimizer.step()


@cache
def trained_alone() -> dict[str, torch.Tensor]:
    module = model()
    train(module, lambda full: full)
    return dict(module.state_dict())


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def expect(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(actual) == set(expected), (sorted(actual), sorted(expected))
    for name in expected:
        torch.testing.assert_close(full(actual[name]).detach(), expected[name], rtol=1e-11, atol=1e-13, msg=name)


def check_distributed_data_parallel() -> None:
    for settings in ({}, {"bucket_cap_mb": 0.001}, {"static_graph": True, "gradient_as_bucket_view": True}):
        wrapped = DistributedDataParallel(model(), **settings)
        train(wrapped, my_share)
        expect(wrapped.module.state_dict(), trained_alone())


def check_ddp_brings_ranks_to_one_start() -> None:
    torch.manual_seed(dist.get_rank())
    wrapped = DistributedDataParallel(nn.Linear(3, 3))
    weights = [torch.empty(3, 3) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, wrapped.module.weight.detach())
    assert all(torch.equal(weight, weights[0]) for weight in weights)


def sharded() -> nn.Module:
    module = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def check_fully_shard() -> None:
    module = sharded()
    train(module, my_share)
    expect(module.state_dict(), trained_alone())


def check_fully_shard_on_two_axes() -> None:
    module = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("copy", "shard"))
    for block in module:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    train(module, my_share)
    expect(module.state_dict(), trained_alone())


def check_tensor_parallel() -> None:
    module = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {f"{i}.up": ColwiseParallel() for i in range(blocks())}
    plan |= {f"{i}.down": RowwiseParallel() for i in range(blocks())}
    parallelize_module(module, mesh, plan)
    train(module, lambda batch: batch)
    expect(module.state_dict(), trained_alone())


def stages_of(schedule: type, rank: int, size: int) -> list[int]:
    if issubclass(schedule, schedules.PipelineScheduleSingle):
        return [rank]
    if schedule.__name__ in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        return [rank, 2 * size - 1 - rank]  # the pipeline runs down and up again
    return [rank, rank + size]


def pipeline_schedules() -> list[type]:
    names = (
        "GPipe",
        "1F1B",
        "LoopedBFS",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    )
    return [getattr(schedules, f"Schedule{name}") for name in names if hasattr(schedules, f"Schedule{name}")]


def check_every_pipeline_schedule() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = model()
    inputs, targets = batch(0)
    alone_loss = nn.functional.mse_loss(alone(inputs), targets)
    alone_loss.backward()
    assert len(pipeline_schedules()) >= 6
    for kind in pipeline_schedules():
        numbers = stages_of(kind, rank, size)
        count = size * len(numbers)
        module = model()
        parts = [nn.Sequential(*chunk) for chunk in _cut(list(module), count)]
        stages = [PipelineStage(parts[number], number, count, torch.device("cpu")) for number in numbers]
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        schedule = kind(stages[0] if single else stages, 2 * size, loss_fn=nn.functional.mse_loss)
        losses: list[torch.Tensor] = []
        first = [inputs] if 0 in numbers else []
        last = {"target": targets, "losses": losses} if count - 1 in numbers else {}
        schedule.step(*first, **last)
        if losses:
            torch.testing.assert_close(torch.stack(losses).mean(), alone_loss.detach(), rtol=1e-12, atol=0)
        reference = [nn.Sequential(*chunk) for chunk in _cut(list(alone), count)]
        for number in numbers:
            pairs = zip(parts[number].named_parameters(), reference[number].parameters(), strict=True)
            for (name, mine), other in pairs:
                what = f"{kind.__name__} stage {number} {name}"
                torch.testing.assert_close(mine.grad, other.grad, rtol=1e-11, atol=1e-13, msg=what)
        dist.barrier()


def _cut(layers: list[nn.Module], count: int) -> list[list[nn.Module]]:
    each = len(layers) // count
    return [layers[i * each : (i + 1) * each] for i in range(count)]


def check_checkpoint() -> None:
    folder = os.path.join(os.environ["TEST_FOLDER"], "checkpoint")
    saved = sharded()
    train(saved, my_share)
    dcp.save({"model": get_model_state_dict(saved)}, checkpoint_id=folder)
    again = sharded()
    state = {"model": get_model_state_dict(again)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(again, state["model"])
    expect(again.state_dict(), trained_alone())
    plain = {"model": model().state_dict()}  # unsharded, as one process would load it
    dcp.load(plain, checkpoint_id=folder)
    expect(plain["model"], trained_alone())


if __name__ == "__main__":
    harness.main(globals())
