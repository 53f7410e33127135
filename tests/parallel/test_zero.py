"""ZeRO: the same results with state, gradients and parameters spread over the replicas; and what each stage costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.parallel import replicas
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.mesh.mesh import Mesh
from unisono.parallel.layout import layout_of, whole_of
from unisono.parallel.state import whole_state
from unisono.parallel.zero import Zero

Pools = Callable[[str, int], RankPool]


def whole_gradients(zero: Zero) -> dict[str, torch.Tensor | None]:
    grads: dict[str, torch.Tensor | None] = {}
    for name, tensor in zero.optimized():
        missing = torch.tensor(float(tensor.grad is None))
        zero.mesh.comm().all_reduce(missing, "min")  # a rank that owns nothing of it may have none
        local = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        grads[name] = None if missing else whole_of(local, layout_of(tensor), zero.mesh)
    return grads


def trained(comm: Communicator, name: str, stage: int, rows: int, microbatches: int = 1) -> None:
    mesh = Mesh((comm.size,), ("dp",))
    model = replicas.net()
    zero = Zero(model, mesh, replicas.optimizers()[name], stage, bucket_bytes=400)
    expected = replicas.plain(name, rows)
    losses = []
    for step in range(replicas.STEPS):
        zero.optimizer.zero_grad()
        losses.append(replicas.run_step(model, mesh, step, rows, microbatches, zero.hold))
        zero.finish()
        gradients = whole_gradients(zero)
        zero.optimizer.step()
    for step, (mine, theirs) in enumerate(zip(losses, expected["losses"], strict=True)):
        replicas.same(mine, theirs, f"loss {step}")
    state = whole_state(zero.optimizer, zero.optimized(), mesh)["state"]
    for key, parameter in model.named_parameters():
        replicas.same(gradients[key], expected["gradients"][key], f"gradient {key}")
        whole = whole_of(parameter, layout_of(parameter), mesh)
        replicas.same(whole, expected["parameters"][key].detach(), f"parameter {key}")
        assert set(state[key]) == set(expected["state"][key]), key
        for entry, value in expected["state"][key].items():
            if isinstance(value, torch.Tensor):
                replicas.same(state[key][entry], value, f"state {key}.{entry}")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", list(replicas.optimizers()))
def test_every_optimizer(pools: Pools, name: str, stage: int) -> None:
    pools("gloo", 2).run(trained, name, stage, 5)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 4])
def test_sizes_and_microbatches(pools: Pools, stage: int, size: int) -> None:
    pools("gloo", size).run(trained, "adamw", stage, 7)
    pools("gloo", size).run(trained, "momentum", stage, 11, 2)
    pools("gloo", size).run(trained, "adamw", stage, 3, 2)  # with four ranks, one has nothing
