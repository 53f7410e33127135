"""CommController on real ranks of each CPU backend, and its bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import RankPool
from unisono.compat.vqnet import nn, tensor
from unisono.compat.vqnet.distributed import (
    ColumnParallelLinear,
    CommController,
    RowParallelLinear,
    init_group,
    split_data,
)
from unisono.errors import UsageError

Pools = Callable[[str, int], RankPool]


def everything(comm: Any) -> dict[str, Any]:
    controller = CommController("nccl", rank=comm.rank, world_size=comm.size)
    rank = controller.getRank()

    def mine() -> tensor.QTensor:
        return tensor.QTensor([[rank + 1.0, 2.0]])

    found: dict[str, Any] = {}
    for op in ("avg", "sum", "max", "min"):
        value = mine()
        controller.allreduce(value, op)
        found[op] = value.tolist()
    value = mine()
    controller.reduce(value, root=2)
    found["reduce"] = value.tolist()
    groups = controller.split_group([np.array([0, 3]), [1, 2, 3]])  # type: ignore[list-item]  # rank 3 is in both
    for number, group in enumerate(groups):
        if rank in group.ranks:
            summed, reported, gathered = mine(), mine(), controller.allgather_group(mine(), group)
            controller.allreduce_group(summed, "sum", group=group[0])
            controller.broadcast_group(reported, root=1, group=group)  # a rank of the group
            found[f"group {number}"] = [summed.tolist(), reported.tolist(), gathered.tolist()]
    model = nn.Sequential(nn.Linear(2, 2), ColumnParallelLinear(2, 8, tp_comm=controller))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(rank)
    controller.broadcast_model_params(model, 1)
    found["parameters"] = [float(parameter.mean()) for parameter in model.parameters()]
    found["data"] = split_data([*range(10)], [*range(10)])[0]
    return found


def test_every_call(ranks4: RankPool) -> None:
    answers = ranks4.run(everything)
    for rank, found in enumerate(answers):
        assert [found[op][0][0] for op in ("avg", "sum", "max", "min")] == [2.5, 10.0, 4.0, 1.0]
        assert found["reduce"][0][0] == (2.5 if rank == 2 else rank + 1)
        if rank in (0, 3):
            assert found["group 0"] == [[[5.0, 4.0]], [[4.0, 2.0]], [[1.0, 2.0], [4.0, 2.0]]]
        if rank:
            assert found["group 1"] == [[[9.0, 6.0]], [[3.0, 2.0]], [[2.0, 2.0], [3.0, 2.0], [4.0, 2.0]]]
        assert found["parameters"] == [1.0, 1.0, rank, rank]  # shards of a shared layer are each rank's own
    assert [each for found in answers for each in found["data"]] == [*range(10)]


def refusals(comm: Any) -> list[str]:
    controller = CommController("mpi")
    (group,) = init_group([[0]])
    outsider: Callable[[], Any] = lambda: controller.allreduce_group(torch.ones(1), group=group)  # noqa: E731
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: controller.allreduce([1.0]), "allreduce takes a tensor, not a list"),  # type: ignore[arg-type]
        (lambda: controller.allreduce(torch.ones(1), "median"), "median"),
        (lambda: controller.broadcast(torch.ones(1), 2), "root"),
        (lambda: controller.reduce(torch.ones(1), 0.0), r"reduce: root=0\.0; expected a rank"),  # type: ignore[arg-type]
        (lambda: controller.broadcast(torch.ones(1), torch.tensor(0.5)), "broadcast: root=tensor"),  # type: ignore[arg-type]
        (lambda: controller.send(torch.ones(1), "1"), "send: dest='1'; expected a rank"),  # type: ignore[arg-type]
        (lambda: controller.broadcast_model_params(nn.Linear(1, 1), True), "root=True; expected a rank"),
        (lambda: RowParallelLinear(4, 2)([1.0, 2.0]), "RowParallelLinear takes a tensor, not a list"),  # type: ignore[arg-type]
        (lambda: ColumnParallelLinear(4, 2)(torch.tensor(1.0)), r"ColumnParallelLinear takes .*not a single number"),
        (lambda: RowParallelLinear(4, 2)(torch.ones(3, 4).long()), r"not torch\.int64; convert it with astype"),
        (
            lambda: ColumnParallelLinear(4, 2, weight_initializer=lambda shape: None),
            r"initializer <lambda> gave None; expected a tensor of shape \(4, 2\)",
        ),
        (lambda: controller.split_group([[0, 2]]), "rank 2 is not one of 0 to 1"),
        (lambda: controller.split_group([[0, 0]]), "expected different ranks"),
        (lambda: controller.split_group([0, 1]), r"groups 0: expected a list of ranks for each, such as \[\[0, 1\]"),  # type: ignore[list-item]
        (lambda: controller.split_group([["a"]]), r"group \['a'\]: expected a list of ranks"),  # type: ignore[list-item]
        (lambda: controller.broadcast_model_params(7), "broadcast_model_params takes a Module, not a int"),  # type: ignore[arg-type]
        (
            lambda: controller.broadcast_group(torch.ones(1), group=3),
            "group=3: expected an element of what split_group",
        ),
        (lambda: CommController("mpi", world_size=3), "world_size=3 was given, but this process is rank"),
        (lambda: ColumnParallelLinear(2, 2, tp_comm="mpi"), "communicator of type str: expected a CommController"),
    ]
    if comm.rank:
        calls.append((outsider, r"rank 1 is not in group \[0\]"))
    for call, reported in calls:
        with pytest.raises(UsageError, match=reported):
            call()
    comm.barrier()
    return [reported for _, reported in calls]


def test_bad_calls_are_refused_before_anyone_waits(pools: Pools) -> None:
    few, many = pools("gloo", 2).run(refusals)
    assert len(many) == len(few) + 1
