"""Clipping and scaling over shards of every kind, against torch's functions on the full model."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.parallel.data.clip import clip_by_norm, clip_by_value, gradient_norm
from unisono.parallel.layout import UNSHARDED, Layout, Split, full_tensor_of, local_of, set_layout
from unisono.parallel.loss.loss_scale import LossScaler
from unisono.parallel.precision import accumulate_in_float32, autocast

Pools = Callable[[str, int], RankPool]
SHAPES = {"replica": (3, 4), "columns": (5, 2), "rows": (3, 7), "both": (6, 5), "number": ()}


def full_model() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    model = {}
    for name, shape in SHAPES.items():
        model[name] = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        model[name].grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    return model


def shards(model: dict[str, nn.Parameter], mesh: Mesh) -> dict[str, nn.Parameter]:
    """Cut over tp, over the replicas (as ZeRO does) and over both; the rest is on every rank."""
    layouts = {
        "columns": Layout((Split.even(("tp",), 0, 5, 2),)),
        "rows": Layout((Split.even(("dp",), 1, 7, 2),)),
        "both": Layout((Split.even(("tp",), 0, 6, 2), Split.even(("dp",), 0, 3, 2))),
    }
    sharded = {}
    for name, full in model.items():
        layout = layouts.get(name, UNSHARDED)
        sharded[name] = nn.Parameter(local_of(full.detach(), layout, mesh))
        sharded[name].grad = local_of(full.grad, layout, mesh).clone()
        set_layout(sharded[name], layout)
    return sharded


def clipped(comm: Communicator, norm_type: float, most: float) -> None:
    mesh = Mesh((1, 2, 2), ("pp", "dp", "tp"))
    model = full_model()
    sharded = shards(model, mesh)
    tied = [*sharded.values(), sharded["both"]]  # a parameter that is listed twice counts once
    norm = clip_by_norm(tied, most, mesh, norm_type)
    expected = nn.utils.clip_grad_norm_(model.values(), most, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    for name, shard in sharded.items():
        full = full_tensor_of(shard.grad, shard.unisono_layout, mesh)
        torch.testing.assert_close(full, model[name].grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, math.inf])
def test_norm_over_every_kind_of_shard(pools: Pools, norm_type: float) -> None:
    for most in (0.7, 1e6):
        pools("gloo", 4).run(clipped, norm_type, most)


def staged(comm: Communicator) -> None:
    """Two stages with different parameters and one that is tied between them."""
    mesh = Mesh((2, 2), ("pp", "dp"))
    stage = mesh.index("pp")
    own, tied = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    own.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]][stage])
    tied.grad = torch.tensor([5.0])
    norm = gradient_norm([own, tied], mesh, uncounted=[tied] if stage else [])
    assert norm == pytest.approx(math.sqrt(1 + 4 + 9 + 16 + 25))


def scaled(comm: Communicator) -> list[float]:
    """One rank of four overflows: all skip the step and halve the scale."""
    mesh = Mesh((2, 2), ("pp", "dp"))
    scaler = LossScaler(mesh, init_scale=8.0, growth_interval=2)
    weight = nn.Parameter(torch.tensor([2.0]))
    scales = []
    for step in range(4):
        weight.grad = None
        scaler.scale(weight.sum() * 3).backward()
        if comm.rank == 3 and step == 0:
            weight.grad[0] = math.inf
        scaler.unscale([weight])
        assert scaler.is_finite == (step != 0)
        if scaler.is_finite:
            assert weight.grad.tolist() == [3.0]
        scaler.update()
        scales.append(scaler.value)
    again = LossScaler(mesh)
    again.load_state_dict(scaler.state_dict())
    assert again.state_dict() == {"scale": 8.0, "good_steps": 1}
    with pytest.raises(UsageError, match="unscale the gradients"):
        scaler.update()
    return scales


def test_stages_and_scales(pools: Pools) -> None:
    pools("gloo", 4).run(staged)
    assert pools("gloo", 4).run(scaled) == [[4.0, 4.0, 8.0, 8.0]] * 4


def clip_alone(comm: Communicator) -> None:
    mesh = Mesh((1,), ("dp",))
    parameter = nn.Parameter(torch.zeros(3))
    assert gradient_norm([parameter], mesh) == 0
    parameter.grad = torch.tensor([-3.0, 0.5, 2.0])
    clip_by_value([parameter, nn.Parameter(torch.zeros(1))], 1.0)
    assert parameter.grad.tolist() == [-1.0, 0.5, 1.0]
    parameter.grad[0] = math.nan
    with pytest.raises(UsageError, match="norm of the gradients is nan"):
        clip_by_norm([parameter], 1.0, mesh, error_if_nonfinite=True)
    for wrong in (lambda: clip_by_norm([parameter], -1.0, mesh), lambda: clip_by_value([parameter], math.nan)):
        with pytest.raises(UsageError, match="expected a number of at least 0"):
            wrong()
    with pytest.raises(UsageError, match="expected a number above 0, or inf"):
        gradient_norm([parameter], mesh, 0)
    with pytest.raises(UsageError, match="backoff_factor=2"):
        LossScaler(mesh, backoff_factor=2)


def test_one_rank(pools: Pools) -> None:
    pools("gloo", 1).run(clip_alone)


def test_precision() -> None:
    linear = nn.Linear(2, 2)
    with autocast(torch.bfloat16, torch.device("cpu")):
        assert linear(torch.ones(1, 2)).dtype == torch.bfloat16
    for full in (None, torch.float32):
        with autocast(full, torch.device("cpu")):
            assert linear(torch.ones(1, 2)).dtype == torch.float32
    with pytest.raises(UsageError, match="expected float16"):
        autocast(torch.int8, torch.device("cpu"))
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    accumulate_in_float32([weight])
    for _ in range(300):  # in bfloat16 the sum would stay at 256
        weight.sum().backward()
    assert weight.grad.dtype == torch.float32
    assert weight.grad.item() == 300
