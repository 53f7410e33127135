"""Training the plain model and the parallel one side by side, and comparing all that comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from unisono.comm.communicator import Communicator
from unisono.mesh.mesh import Mesh
from unisono.mesh.random import RandomState
from unisono.parallel.layout import layout_of, wholes_of
from unisono.parallel.tensor import tensor_parallelize

Build = Callable[[], nn.Module]
Objective = Callable[[nn.Module, torch.Tensor], torch.Tensor]  # the loss of a model on a batch


def seeded(build: Build) -> nn.Module:
    torch.manual_seed(5)
    return build().double()


class InDouble(TorchFunctionMode):
    """Nothing is made float32 that a float64 model has: Hugging Face's norms and routers round to float32, and then a
    difference in the last bit of a float64 may become one in the last bit of a float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double() if args[0].dtype == torch.float64 else func(*args, **kwargs)
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return func(*args, **kwargs)


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


def whole_gradients(model: nn.Module, mesh: Mesh) -> dict[str, torch.Tensor]:
    gradients = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        gradients.append(parameter.grad)
    return _wholes(model, gradients, mesh)


def whole_parameters(model: nn.Module, mesh: Mesh) -> dict[str, torch.Tensor]:
    return _wholes(model, [parameter for _, parameter in model.named_parameters()], mesh)


def _wholes(model: nn.Module, held: list[torch.Tensor], mesh: Mesh) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters())
    wholes = wholes_of(held, [layout_of(parameter) for parameter in named.values()], mesh)
    return dict(zip(named, wholes, strict=True))


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
    """Three steps of both; returns the names of the parameters that were cut and of those summed over tp."""
    mesh = tp_mesh(comm)
    plain, parallel = seeded(build), seeded(build)
    names = [name for name, _ in plain.named_parameters()]
    tensor_parallelize(parallel, mesh, rules, sequence)
    assert [name for name, _ in parallel.named_parameters()] == names
    for name, whole in whole_parameters(parallel, mesh).items():
        assert torch.equal(whole, plain.get_parameter(name)), f"{name} differs before the first step"
    random = [RandomState(seed=7), RandomState(seed=7)]
    for state, model in zip(random, (plain, parallel), strict=True):
        state.name_modules(model)
    optimizers = [getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2) for model in (plain, parallel)]
    for step in range(3):
        torch.manual_seed(100 + step)
        inputs = batch()
        losses = []
        objectives = (objective, parallel_objective or objective)
        for model, state, loss_of in zip((plain, parallel), random, objectives, strict=True):
            model.zero_grad()
            state.step = step
            with state:
                loss = loss_of(model, inputs)
                loss.backward()
            losses.append(loss.detach())
        sum_over_tp(parallel, mesh)
        close(losses[1], losses[0], f"step {step}: the loss")
        for name, grad in whole_gradients(parallel, mesh).items():
            close(grad, plain.get_parameter(name).grad, f"step {step}: the gradient of {name}")
        for each in optimizers:
            each.step()
        for name, whole in whole_parameters(parallel, mesh).items():
            close(whole, plain.get_parameter(name).detach(), f"step {step}: parameter {name}")
    layouts = {name: layout_of(parameter) for name, parameter in parallel.named_parameters()}
    return {
        "cut": [name for name, layout in layouts.items() if "tp" in layout.axes],
        "summed": [name for name, layout in layouts.items() if "tp" in layout.summed],
    }
