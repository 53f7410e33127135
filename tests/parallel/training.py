"""Training the plain model and the parallel one side by side, and comparing all that comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from unisono.comm.communicator import Communicator
from unisono.mesh.mesh import Mesh
from unisono.mesh.random.state import RandomState
from unisono.parallel.layout import full_tensors_of, layout_of
from unisono.parallel.tensor.tensor_parallel import tensor_parallelize

Build = Callable[[], nn.Module]
STEPS = 2
Objective = Callable[[nn.Module, torch.Tensor], torch.Tensor]  # the loss of a model on a batch


def seeded(build: Build) -> nn.Module:
    torch.manual_seed(5)
    return build().double()


def tp_mesh(comm: Communicator) -> Mesh:
    return Mesh((comm.size,), ("tp",))


def sum_over_tp(model: nn.Module, mesh: Mesh) -> None:
    """What a trainer does for gradients that tp ranks have parts of."""
    for parameter in model.parameters():
        if parameter.grad is not None and "tp" in layout_of(parameter).summed:
            mesh.comm("tp").all_reduce(parameter.grad)


def close(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert got.shape == expected.shape, f"{what}: {tuple(got.shape)} instead of {tuple(expected.shape)}"
    worst = (got - expected).abs().max() / expected.abs().max().clamp_min(1e-3) if got.numel() else torch.zeros(())
    assert worst <= 1e-9, f"{what} is off by {worst:.1e} relative"


def full_gradients(model: nn.Module, mesh: Mesh) -> dict[str, torch.Tensor]:
    gradients = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        gradients.append(parameter.grad)
    return _wholes(model, gradients, mesh)


def full_parameters(model: nn.Module, mesh: Mesh) -> dict[str, torch.Tensor]:
    return _wholes(model, [parameter for _, parameter in model.named_parameters()], mesh)


def _wholes(model: nn.Module, held: list[torch.Tensor], mesh: Mesh) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters())
    wholes = full_tensors_of(held, [layout_of(parameter) for parameter in named.values()], mesh)
    return dict(zip(named, wholes, strict=True))


@dataclass
class Plain:
    """What the plain model comes to, by name: at the start, and step by step."""

    initial: dict[str, torch.Tensor]
    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parameters: list[dict[str, torch.Tensor]] = field(default_factory=list)


def _plain(build: Build, batch: Callable[[], torch.Tensor], objective: Objective, optimizer: str) -> Plain:
    model = seeded(build)
    random = RandomState(seed=7)
    random.name_modules(model)
    stepping = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2)
    found = Plain({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    for step in range(STEPS):
        found.losses.append(_one_step(model, random, step, batch, objective))
        found.gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})  # type: ignore[union-attr]
        stepping.step()
        found.parameters.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return found


def _one_step(
    model: nn.Module, random: RandomState, step: int, batch: Callable[[], torch.Tensor], objective: Objective
) -> torch.Tensor:
    """Forward and backward; the loss."""
    torch.manual_seed(100 + step)
    inputs = batch()
    model.zero_grad()
    random.step = step
    with random:
        loss = objective(model, inputs)
        loss.backward()
    return loss.detach()


def check_training(
    comm: Communicator,
    build: Build,
    batch: Callable[[], torch.Tensor],
    objective: Objective,
    rules: Mapping[str, str] | None = None,
    sequence: bool = False,
    optimizer: str = "AdamW",
    parallel_objective: Objective | None = None,
) -> dict[str, Any]:
    """Two steps of both; returns the names of the parameters that were sharded and of those summed over tp."""
    mesh = tp_mesh(comm)
    expected = comm.broadcast_object(_plain(build, batch, objective, optimizer) if comm.rank == 0 else None)
    model = seeded(build)
    tensor_parallelize(model, mesh, rules, sequence)
    for name, full in full_parameters(model, mesh).items():
        assert torch.equal(full, expected.initial[name]), f"{name} differs before the first step"
    assert [name for name, _ in model.named_parameters()] == list(expected.initial)
    random = RandomState(seed=7)
    random.name_modules(model)
    stepping = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = _one_step(model, random, step, batch, parallel_objective or objective)
        sum_over_tp(model, mesh)
        close(loss, expected.losses[step], f"step {step}: the loss")
        for name, grad in full_gradients(model, mesh).items():
            close(grad, expected.gradients[step][name], f"step {step}: the gradient of {name}")
        stepping.step()
        for name, full in full_parameters(model, mesh).items():
            close(full, expected.parameters[step][name], f"step {step}: parameter {name}")
    layouts = {name: layout_of(parameter) for name, parameter in model.named_parameters()}
    return {
        "sharded": [name for name, layout in layouts.items() if "tp" in layout.axes],
        "summed": [name for name, layout in layouts.items() if "tp" in layout.summed],
    }
